package halflife.node;

import static org.elasticsearch.plugins.AnalysisPlugin.requiresAnalysisSettings;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.function.UnaryOperator;
import java.util.regex.Pattern;
import org.apache.lucene.analysis.CharArraySet;
import org.apache.lucene.analysis.LowerCaseFilter;
import org.apache.lucene.analysis.StopFilter;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.ar.ArabicNormalizationFilter;
import org.apache.lucene.analysis.ar.ArabicStemFilter;
import org.apache.lucene.analysis.bn.BengaliNormalizationFilter;
import org.apache.lucene.analysis.br.BrazilianStemFilter;
import org.apache.lucene.analysis.cjk.CJKBigramFilter;
import org.apache.lucene.analysis.cjk.CJKWidthFilter;
import org.apache.lucene.analysis.ckb.SoraniNormalizationFilter;
import org.apache.lucene.analysis.classic.ClassicFilter;
import org.apache.lucene.analysis.commongrams.CommonGramsFilter;
import org.apache.lucene.analysis.commongrams.CommonGramsQueryFilter;
import org.apache.lucene.analysis.core.DecimalDigitFilter;
import org.apache.lucene.analysis.core.FlattenGraphFilter;
import org.apache.lucene.analysis.core.TypeTokenFilter;
import org.apache.lucene.analysis.core.UpperCaseFilter;
import org.apache.lucene.analysis.cz.CzechStemFilter;
import org.apache.lucene.analysis.de.GermanNormalizationFilter;
import org.apache.lucene.analysis.de.GermanStemFilter;
import org.apache.lucene.analysis.el.GreekLowerCaseFilter;
import org.apache.lucene.analysis.en.EnglishAnalyzer;
import org.apache.lucene.analysis.en.KStemFilter;
import org.apache.lucene.analysis.en.PorterStemFilter;
import org.apache.lucene.analysis.fa.PersianNormalizationFilter;
import org.apache.lucene.analysis.fa.PersianStemFilter;
import org.apache.lucene.analysis.fr.FrenchAnalyzer;
import org.apache.lucene.analysis.ga.IrishLowerCaseFilter;
import org.apache.lucene.analysis.hi.HindiNormalizationFilter;
import org.apache.lucene.analysis.in.IndicNormalizationFilter;
import org.apache.lucene.analysis.minhash.MinHashFilterFactory;
import org.apache.lucene.analysis.miscellaneous.ASCIIFoldingFilter;
import org.apache.lucene.analysis.miscellaneous.FingerprintFilter;
import org.apache.lucene.analysis.miscellaneous.KeepWordFilter;
import org.apache.lucene.analysis.miscellaneous.KeywordRepeatFilter;
import org.apache.lucene.analysis.miscellaneous.LengthFilter;
import org.apache.lucene.analysis.miscellaneous.LimitTokenCountFilter;
import org.apache.lucene.analysis.miscellaneous.PatternKeywordMarkerFilter;
import org.apache.lucene.analysis.miscellaneous.RemoveDuplicatesTokenFilter;
import org.apache.lucene.analysis.miscellaneous.ScandinavianFoldingFilter;
import org.apache.lucene.analysis.miscellaneous.ScandinavianNormalizationFilter;
import org.apache.lucene.analysis.miscellaneous.SetKeywordMarkerFilter;
import org.apache.lucene.analysis.miscellaneous.StemmerOverrideFilter;
import org.apache.lucene.analysis.miscellaneous.TrimFilter;
import org.apache.lucene.analysis.miscellaneous.TruncateTokenFilter;
import org.apache.lucene.analysis.miscellaneous.WordDelimiterFilter;
import org.apache.lucene.analysis.miscellaneous.WordDelimiterGraphFilter;
import org.apache.lucene.analysis.miscellaneous.WordDelimiterIterator;
import org.apache.lucene.analysis.ngram.EdgeNGramTokenFilter;
import org.apache.lucene.analysis.ngram.NGramTokenFilter;
import org.apache.lucene.analysis.pattern.PatternCaptureGroupTokenFilter;
import org.apache.lucene.analysis.pattern.PatternReplaceFilter;
import org.apache.lucene.analysis.reverse.ReverseStringFilter;
import org.apache.lucene.analysis.shingle.ShingleFilter;
import org.apache.lucene.analysis.snowball.SnowballFilter;
import org.apache.lucene.analysis.sr.SerbianNormalizationFilter;
import org.apache.lucene.analysis.sr.SerbianNormalizationRegularFilter;
import org.apache.lucene.analysis.tr.ApostropheFilter;
import org.apache.lucene.analysis.tr.TurkishLowerCaseFilter;
import org.apache.lucene.analysis.util.ElisionFilter;
import org.elasticsearch.common.Strings;
import org.elasticsearch.index.analysis.Analysis;
import org.elasticsearch.index.analysis.PreConfiguredTokenFilter;
import org.elasticsearch.index.analysis.TokenFilterFactory;
import org.elasticsearch.indices.analysis.AnalysisModule.AnalysisProvider;
import org.elasticsearch.lucene.analysis.miscellaneous.DisableGraphAttribute;

/**
 * The token filters that the bare server lacks, by the names and with the settings and defaults that Elasticsearch
 * documents for them. Not here: {@code condition} and {@code predicate_token_filter} (they need a script language)
 * and the two decompounders; a template that names one is refused by the server as an unknown filter.
 */
final class Filters {
    private Filters() {}

    /** Filters that a template may define with settings of its own. Synonyms and the multiplexer are added by the plugin. */
    static Map<String, AnalysisProvider<TokenFilterFactory>> configurable() {
        Map<String, AnalysisProvider<TokenFilterFactory>> filters = new TreeMap<>();
        withoutSettings(filters);
        shaping(filters);
        choosing(filters);
        splitting(filters);
        stemming(filters);
        return filters;
    }

    private static void withoutSettings(Map<String, AnalysisProvider<TokenFilterFactory>> filters) {
        filters.put("apostrophe", Filter.plain(ApostropheFilter::new));
        filters.put("arabic_normalization", Filter.characters(ArabicNormalizationFilter::new));
        filters.put("arabic_stem", Filter.plain(ArabicStemFilter::new));
        filters.put("bengali_normalization", Filter.characters(BengaliNormalizationFilter::new));
        filters.put("cjk_width", Filter.characters(CJKWidthFilter::new));
        filters.put("classic", Filter.plain(ClassicFilter::new));
        filters.put("decimal_digit", Filter.characters(DecimalDigitFilter::new));
        filters.put("flatten_graph", Filter.plain(FlattenGraphFilter::new));
        filters.put("german_normalization", Filter.characters(GermanNormalizationFilter::new));
        filters.put("hindi_normalization", Filter.characters(HindiNormalizationFilter::new));
        filters.put("indic_normalization", Filter.characters(IndicNormalizationFilter::new));
        filters.put("kstem", Filter.plain(KStemFilter::new));
        filters.put("persian_normalization", Filter.characters(PersianNormalizationFilter::new));
        filters.put("persian_stem", Filter.plain(PersianStemFilter::new));
        filters.put("porter_stem", Filter.plain(PorterStemFilter::new));
        filters.put("remove_duplicates", Filter.plain(RemoveDuplicatesTokenFilter::new));
        filters.put("reverse", Filter.plain(ReverseStringFilter::new));
        filters.put("russian_stem", Filter.plain(input -> new SnowballFilter(input, "Russian")));
        filters.put("scandinavian_folding", Filter.characters(ScandinavianFoldingFilter::new));
        filters.put("scandinavian_normalization", Filter.characters(ScandinavianNormalizationFilter::new));
        filters.put("sorani_normalization", Filter.characters(SoraniNormalizationFilter::new));
        filters.put("trim", Filter.characters(TrimFilter::new));
        filters.put("uppercase", Filter.characters(UpperCaseFilter::new));
    }

    /** Filters that change a token's text. */
    private static void shaping(Map<String, AnalysisProvider<TokenFilterFactory>> filters) {
        filters.put("asciifolding", (index, environment, name, settings) -> {
            TokenFilterFactory folding = Filter.onCharacters(name, ASCIIFoldingFilter::new);
            if (settings.getAsBoolean("preserve_original", false) == false) {
                return folding;
            }
            return new KeepingOriginal(name, input -> new ASCIIFoldingFilter(input, true), folding);
        });
        filters.put("elision", requiresAnalysisSettings((index, environment, name, settings) -> {
            CharArraySet articles = Analysis.parseArticles(environment, settings);
            if (articles == null) {
                throw new IllegalArgumentException("elision filter requires [articles] or [articles_path] setting");
            }
            return Filter.onCharacters(name, input -> new ElisionFilter(input, articles));
        }));
        filters.put("lowercase", (index, environment, name, settings) -> {
            String language = settings.get("language", "").toLowerCase(Locale.ROOT);
            return Filter.onCharacters(name, switch (language) {
                case "" -> LowerCaseFilter::new;
                case "greek" -> GreekLowerCaseFilter::new;
                case "irish" -> IrishLowerCaseFilter::new;
                case "turkish" -> TurkishLowerCaseFilter::new;
                default -> throw new IllegalArgumentException("language [" + language + "] not support for lower case");
            });
        });
        filters.put("pattern_replace", requiresAnalysisSettings(Filter.words(options -> {
            Pattern pattern = options.pattern(null);
            String replacement = options.text("replacement", "");
            boolean all = options.flag("all", true);
            return input -> new PatternReplaceFilter(input, pattern, replacement, all);
        })));
        filters.put("serbian_normalization", (index, environment, name, settings) -> {
            boolean regular = settings.get("haircut", "bald").equals("regular");
            return Filter.onCharacters(name, regular ? SerbianNormalizationRegularFilter::new : SerbianNormalizationFilter::new);
        });
        filters.put("truncate", requiresAnalysisSettings(Filter.words(options -> {
            int length = options.number("length", -1);
            if (length <= 0) {
                throw new IllegalArgumentException("length parameter must be provided");
            }
            return input -> new TruncateTokenFilter(input, length);
        })));
    }

    /** Filters that drop or mark tokens. */
    private static void choosing(Map<String, AnalysisProvider<TokenFilterFactory>> filters) {
        filters.put("keep", requiresAnalysisSettings((index, environment, name, settings) -> {
            boolean listed = settings.hasValue("keep_words");
            if (listed == settings.hasValue("keep_words_path")) {
                throw new IllegalArgumentException("keep requires either `keep_words` or `keep_words_path` to be configured");
            }
            Set<?> words = Analysis.getWordSet(environment, settings, "keep_words");
            CharArraySet kept = new CharArraySet(words, settings.getAsBoolean("keep_words_case", false));
            return Filter.onWords(name, input -> new KeepWordFilter(input, kept));
        }));
        filters.put("keep_types", requiresAnalysisSettings((index, environment, name, settings) -> {
            Set<String> types = new TreeSet<>(settings.getAsList("types"));
            if (types.isEmpty()) {
                throw new IllegalArgumentException("keep_types requires `types` to be configured");
            }
            String mode = settings.get("mode", "include").toLowerCase(Locale.ROOT);
            if (Set.of("include", "exclude").contains(mode) == false) {
                throw new IllegalArgumentException("`keep_types` tokenfilter mode can only be [include] or [exclude] but was [" + mode + "].");
            }
            return Filter.onWords(name, input -> new TypeTokenFilter(input, types, mode.equals("include")));
        }));
        filters.put("keyword_marker", requiresAnalysisSettings((index, environment, name, settings) -> {
            String expression = settings.get("keywords_pattern");
            Set<?> words = Analysis.getWordSet(environment, settings, "keywords");
            if (expression != null && words != null) {
                throw new IllegalArgumentException("cannot specify both `keywords_pattern` and `keywords` or `keywords_path`");
            }
            if (expression != null) {
                Pattern pattern = Pattern.compile(expression);
                return Filter.onWords(name, input -> new PatternKeywordMarkerFilter(input, pattern));
            }
            if (words == null) {
                throw new IllegalArgumentException(
                    "keyword filter requires either `keywords`, `keywords_path`, or `keywords_pattern` to be configured");
            }
            CharArraySet marked = new CharArraySet(words, settings.getAsBoolean("ignore_case", false));
            return Filter.onWords(name, input -> new SetKeywordMarkerFilter(input, marked));
        }));
        filters.put("length", Filter.words(options -> {
            int least = options.number("min", 0);
            int most = options.number("max", Integer.MAX_VALUE);
            return input -> new LengthFilter(input, least, most);
        }));
        filters.put("limit", Filter.words(options -> {
            int count = options.number("max_token_count", 1);
            boolean consumeAll = options.flag("consume_all_tokens", false);
            return input -> new LimitTokenCountFilter(input, count, consumeAll);
        }));
        filters.put("unique", Filter.words(options -> {
            boolean samePosition = options.flag("only_on_same_position", false);
            return input -> new UniqueFilter(input, samePosition);
        }));
    }

    /** Filters that make several tokens of one, or one of several. */
    private static void splitting(Map<String, AnalysisProvider<TokenFilterFactory>> filters) {
        filters.put("cjk_bigram", (index, environment, name, settings) -> {
            int scripts = cjkScripts(settings.getAsList("ignored_scripts"));
            if (settings.getAsBoolean("output_unigrams", false)) {
                return Filter.notBeforeSynonyms(name, input -> new CJKBigramFilter(input, scripts, true));
            }
            return Filter.onWords(name, input -> new CJKBigramFilter(input, scripts, false));
        });
        filters.put("common_grams", requiresAnalysisSettings((index, environment, name, settings) -> {
            CharArraySet words = Analysis.parseCommonWords(environment, settings, null, settings.getAsBoolean("ignore_case", false));
            if (words == null) {
                throw new IllegalArgumentException(
                    "missing or empty [common_words] or [common_words_path] configuration for common_grams token filter");
            }
            if (settings.getAsBoolean("query_mode", false)) {
                return Filter.onWords(name, input -> new CommonGramsQueryFilter(new CommonGramsFilter(input, words)));
            }
            return Filter.withSynonymFilter(name, input -> new CommonGramsFilter(input, words), TokenFilterFactory.IDENTITY_FILTER);
        }));
        filters.put("edge_ngram", (index, environment, name, settings) -> {
            Options options = new Options(index, environment, name, settings);
            int[] sizes = options.gramSizes(false);
            boolean original = options.flag("preserve_original", false);
            String side = options.text("side", "front");
            UnaryOperator<TokenStream> front = input -> new EdgeNGramTokenFilter(input, sizes[0], sizes[1], original);
            return Filter.grams(name, switch (side) {
                case "front" -> front;
                case "back" -> input -> new ReverseStringFilter(front.apply(new ReverseStringFilter(input)));
                default -> throw new IllegalArgumentException("invalid side: " + side);
            });
        });
        filters.put("fingerprint", (index, environment, name, settings) -> {
            char separator = Analyzers.separator(settings);
            int most = settings.getAsInt("max_output_size", 255);
            return Filter.notBeforeSynonyms(name, input -> new FingerprintFilter(input, most, separator));
        });
        filters.put("min_hash", (index, environment, name, settings) -> {
            Map<String, String> given = new HashMap<>();
            Map.of("hash_count", "hashCount", "bucket_count", "bucketCount", "hash_set_size", "hashSetSize", "with_rotation", "withRotation")
                .forEach((ours, lucene) -> {
                    if (settings.hasValue(ours)) {
                        given.put(lucene, settings.get(ours));
                    }
                });
            return Filter.onWords(name, new MinHashFilterFactory(given)::create);
        });
        filters.put("ngram", (index, environment, name, settings) -> {
            Options options = new Options(index, environment, name, settings);
            int[] sizes = options.gramSizes(true);
            boolean original = options.flag("preserve_original", false);
            return Filter.grams(name, input -> new NGramTokenFilter(input, sizes[0], sizes[1], original));
        });
        filters.put("pattern_capture", requiresAnalysisSettings(Filter.words(options -> {
            if (options.list("patterns").isEmpty()) {
                throw new IllegalArgumentException("required setting 'patterns' is missing for token filter [" + options.name() + "]");
            }
            Pattern[] patterns = options.list("patterns").stream().map(Pattern::compile).toArray(Pattern[]::new);
            boolean original = options.flag("preserve_original", true);
            return input -> new PatternCaptureGroupTokenFilter(input, original, patterns);
        })));
        filters.put("word_delimiter", (index, environment, name, settings) -> {
            Options options = new Options(index, environment, name, settings);
            byte[] types = WordTypes.table(options);
            int flags = WordTypes.flags(options);
            CharArraySet whole = WordTypes.protectedWords(options);
            return Filter.notBeforeSynonyms(name, input -> new WordDelimiterFilter(input, types, flags, whole));
        });
        filters.put("word_delimiter_graph", (index, environment, name, settings) -> {
            Options options = new Options(index, environment, name, settings);
            byte[] types = WordTypes.table(options);
            int keywords = options.flag("ignore_keywords", false) ? WordDelimiterGraphFilter.IGNORE_KEYWORDS : 0;
            int flags = WordTypes.flags(options) | keywords;
            CharArraySet whole = WordTypes.protectedWords(options);
            boolean adjust = options.flag("adjust_offsets", true);
            return Filter.notBeforeSynonyms(name, input -> new WordDelimiterGraphFilter(input, adjust, types, flags, whole));
        });
    }

    private static void stemming(Map<String, AnalysisProvider<TokenFilterFactory>> filters) {
        for (String language : List.of("brazilian", "czech", "dutch", "french", "german")) {
            filters.put(language + "_stem", (index, environment, name, settings) -> {
                CharArraySet untouched = Analysis.parseStemExclusion(settings, CharArraySet.EMPTY_SET);
                UnaryOperator<TokenStream> stem = language.equals("german") ? GermanStemFilter::new : Stemmers.named(language);
                return Filter.onWords(name, input -> stem.apply(new SetKeywordMarkerFilter(input, untouched)));
            });
        }
        filters.put("snowball", Filter.words(options -> {
            String language = Strings.capitalize(options.text("language", options.text("name", "English")));
            return input -> new SnowballFilter(input, language.equals("German2") ? "German" : language);
        }));
        filters.put("stemmer", Filter.words(options -> Stemmers.named(options.text("language", options.text("name", "porter")))));
        filters.put("stemmer_override", requiresAnalysisSettings((index, environment, name, settings) -> {
            List<String> rules = Analysis.getWordList(environment, settings, "rules");
            if (rules == null) {
                throw new IllegalArgumentException("stemmer override filter requires either `rules` or `rules_path` to be configured");
            }
            StemmerOverrideFilter.StemmerOverrideMap map = stemmerOverrides(rules);
            return Filter.onWords(name, input -> new StemmerOverrideFilter(input, map));
        }));
    }

    /** Filters that a template may name without defining them. */
    static List<PreConfiguredTokenFilter> ready() {
        List<PreConfiguredTokenFilter> filters = new ArrayList<>();
        ready(filters, true, Map.ofEntries(
            Map.entry("arabic_normalization", ArabicNormalizationFilter::new),
            Map.entry("asciifolding", ASCIIFoldingFilter::new),
            Map.entry("bengali_normalization", BengaliNormalizationFilter::new),
            Map.entry("cjk_width", CJKWidthFilter::new),
            Map.entry("decimal_digit", DecimalDigitFilter::new),
            Map.entry("elision", input -> new ElisionFilter(input, FrenchAnalyzer.DEFAULT_ARTICLES)),
            Map.entry("german_normalization", GermanNormalizationFilter::new),
            Map.entry("hindi_normalization", HindiNormalizationFilter::new),
            Map.entry("indic_normalization", IndicNormalizationFilter::new),
            Map.entry("persian_normalization", PersianNormalizationFilter::new),
            Map.entry("scandinavian_folding", ScandinavianFoldingFilter::new),
            Map.entry("scandinavian_normalization", ScandinavianNormalizationFilter::new),
            Map.entry("sorani_normalization", SoraniNormalizationFilter::new),
            Map.entry("trim", TrimFilter::new),
            Map.entry("uppercase", UpperCaseFilter::new)));
        ready(filters, false, Map.ofEntries(
            Map.entry("apostrophe", ApostropheFilter::new),
            Map.entry("arabic_stem", ArabicStemFilter::new),
            Map.entry("brazilian_stem", BrazilianStemFilter::new),
            Map.entry("cjk_bigram", CJKBigramFilter::new),
            Map.entry("classic", ClassicFilter::new),
            Map.entry("czech_stem", CzechStemFilter::new),
            Map.entry("dutch_stem", Stemmers.named("dutch")),
            Map.entry("french_stem", Stemmers.named("french")),
            Map.entry("german_stem", GermanStemFilter::new),
            Map.entry("kstem", KStemFilter::new),
            Map.entry("length", input -> new LengthFilter(input, 0, Integer.MAX_VALUE)),
            Map.entry("limit", input -> new LimitTokenCountFilter(input, 1, false)),
            Map.entry("porter_stem", PorterStemFilter::new),
            Map.entry("reverse", ReverseStringFilter::new),
            Map.entry("russian_stem", Stemmers.named("russian")),
            Map.entry("snowball", input -> new SnowballFilter(input, "English")),
            Map.entry("stemmer", PorterStemFilter::new),
            Map.entry("stop", input -> new StopFilter(input, EnglishAnalyzer.ENGLISH_STOP_WORDS_SET)),
            Map.entry("truncate", input -> new TruncateTokenFilter(input, 10)),
            Map.entry("unique", input -> new UniqueFilter(input, false))));
        int words = WordDelimiterGraphFilter.GENERATE_WORD_PARTS | WordDelimiterGraphFilter.GENERATE_NUMBER_PARTS
            | WordDelimiterGraphFilter.SPLIT_ON_CASE_CHANGE | WordDelimiterGraphFilter.SPLIT_ON_NUMERICS
            | WordDelimiterGraphFilter.STEM_ENGLISH_POSSESSIVE;
        byte[] table = WordDelimiterIterator.DEFAULT_WORD_DELIM_TABLE;
        Map<String, UnaryOperator<TokenStream>> multiplying = Map.of(
            "common_grams", input -> new CommonGramsFilter(input, CharArraySet.EMPTY_SET),
            "edge_ngram", input -> new EdgeNGramTokenFilter(input, 1),
            "keyword_repeat", KeywordRepeatFilter::new,
            "ngram", input -> new NGramTokenFilter(input, 1, 2, false),
            "shingle", Filters::shingles,
            "word_delimiter", input -> new WordDelimiterFilter(input, table, WordTypes.legacy(words), null),
            "word_delimiter_graph", input -> new WordDelimiterGraphFilter(input, true, table, words, null));
        multiplying.forEach((name, make) -> filters.add(PreConfiguredTokenFilter.singleton(name, false, false, make::apply)));
        return filters;
    }

    private static void ready(
        List<PreConfiguredTokenFilter> filters, boolean characters, Map<String, UnaryOperator<TokenStream>> named) {
        named.forEach((name, make) -> filters.add(PreConfiguredTokenFilter.singleton(name, characters, make::apply)));
    }

    /** Shingles of several sizes overlap in more ways than a query graph can hold, so the graph is switched off. */
    private static TokenStream shingles(TokenStream input) {
        TokenStream shingles = new ShingleFilter(input);
        shingles.addAttribute(DisableGraphAttribute.class);
        return shingles;
    }

    private static int cjkScripts(List<String> ignored) {
        Map<String, Integer> known = Map.of(
            "han", CJKBigramFilter.HAN, "hiragana", CJKBigramFilter.HIRAGANA,
            "katakana", CJKBigramFilter.KATAKANA, "hangul", CJKBigramFilter.HANGUL);
        int scripts = 0;
        for (Map.Entry<String, Integer> script : known.entrySet()) {
            if (ignored.contains(script.getKey()) == false) {
                scripts |= script.getValue();
            }
        }
        return scripts;
    }

    private static StemmerOverrideFilter.StemmerOverrideMap stemmerOverrides(List<String> rules) {
        StemmerOverrideFilter.Builder builder = new StemmerOverrideFilter.Builder(false);
        for (String rule : rules) {
            String[] sides = rule.split("=>", -1);
            String stem = sides[sides.length - 1].strip();
            if (sides.length != 2 || stem.isEmpty() || stem.contains(",")) {
                throw new IllegalArgumentException("Invalid Keyword override Rule:" + rule);
            }
            for (String word : sides[0].split(",", -1)) {
                if (word.isBlank()) {
                    throw new IllegalArgumentException("Invalid Keyword override Rule:" + rule);
                }
                builder.add(word.strip(), stem);
            }
        }
        try {
            return builder.build();
        } catch (IOException failure) {
            throw new UncheckedIOException(failure);
        }
    }

    /** Folding that keeps the original token: neither normalizers nor synonym rules can do with two tokens. */
    private static final class KeepingOriginal implements TokenFilterFactory {
        private final String name;
        private final UnaryOperator<TokenStream> make;
        private final TokenFilterFactory folding;

        private KeepingOriginal(String name, UnaryOperator<TokenStream> make, TokenFilterFactory folding) {
            this.name = name;
            this.make = make;
            this.folding = folding;
        }

        @Override
        public String name() {
            return name;
        }

        @Override
        public TokenStream create(TokenStream input) {
            return make.apply(input);
        }

        @Override
        public TokenStream normalize(TokenStream input) {
            return folding.create(input);
        }

        @Override
        public TokenFilterFactory getSynonymFilter() {
            return folding;
        }
    }
}
