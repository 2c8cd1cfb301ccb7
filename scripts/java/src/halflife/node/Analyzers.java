package halflife.node;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.function.Function;
import java.util.function.Supplier;
import java.util.regex.Pattern;
import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.CharArraySet;
import org.apache.lucene.analysis.LowerCaseFilter;
import org.apache.lucene.analysis.StopFilter;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.Tokenizer;
import org.apache.lucene.analysis.ar.ArabicAnalyzer;
import org.apache.lucene.analysis.bg.BulgarianAnalyzer;
import org.apache.lucene.analysis.bn.BengaliAnalyzer;
import org.apache.lucene.analysis.br.BrazilianAnalyzer;
import org.apache.lucene.analysis.ca.CatalanAnalyzer;
import org.apache.lucene.analysis.cjk.CJKAnalyzer;
import org.apache.lucene.analysis.ckb.SoraniAnalyzer;
import org.apache.lucene.analysis.core.KeywordAnalyzer;
import org.apache.lucene.analysis.core.SimpleAnalyzer;
import org.apache.lucene.analysis.core.StopAnalyzer;
import org.apache.lucene.analysis.core.WhitespaceAnalyzer;
import org.apache.lucene.analysis.cz.CzechAnalyzer;
import org.apache.lucene.analysis.da.DanishAnalyzer;
import org.apache.lucene.analysis.de.GermanAnalyzer;
import org.apache.lucene.analysis.el.GreekAnalyzer;
import org.apache.lucene.analysis.en.EnglishAnalyzer;
import org.apache.lucene.analysis.es.SpanishAnalyzer;
import org.apache.lucene.analysis.et.EstonianAnalyzer;
import org.apache.lucene.analysis.eu.BasqueAnalyzer;
import org.apache.lucene.analysis.fa.PersianAnalyzer;
import org.apache.lucene.analysis.fi.FinnishAnalyzer;
import org.apache.lucene.analysis.fr.FrenchAnalyzer;
import org.apache.lucene.analysis.ga.IrishAnalyzer;
import org.apache.lucene.analysis.gl.GalicianAnalyzer;
import org.apache.lucene.analysis.hi.HindiAnalyzer;
import org.apache.lucene.analysis.hu.HungarianAnalyzer;
import org.apache.lucene.analysis.hy.ArmenianAnalyzer;
import org.apache.lucene.analysis.id.IndonesianAnalyzer;
import org.apache.lucene.analysis.it.ItalianAnalyzer;
import org.apache.lucene.analysis.lt.LithuanianAnalyzer;
import org.apache.lucene.analysis.lv.LatvianAnalyzer;
import org.apache.lucene.analysis.miscellaneous.ASCIIFoldingFilter;
import org.apache.lucene.analysis.miscellaneous.FingerprintFilter;
import org.apache.lucene.analysis.nl.DutchAnalyzer;
import org.apache.lucene.analysis.no.NorwegianAnalyzer;
import org.apache.lucene.analysis.pattern.PatternTokenizer;
import org.apache.lucene.analysis.pt.PortugueseAnalyzer;
import org.apache.lucene.analysis.ro.RomanianAnalyzer;
import org.apache.lucene.analysis.ru.RussianAnalyzer;
import org.apache.lucene.analysis.standard.StandardAnalyzer;
import org.apache.lucene.analysis.standard.StandardTokenizer;
import org.apache.lucene.analysis.sv.SwedishAnalyzer;
import org.apache.lucene.analysis.th.ThaiAnalyzer;
import org.apache.lucene.analysis.tr.TurkishAnalyzer;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.index.analysis.AbstractIndexAnalyzerProvider;
import org.elasticsearch.index.analysis.Analysis;
import org.elasticsearch.index.analysis.AnalyzerProvider;
import org.elasticsearch.index.analysis.PreBuiltAnalyzerProviderFactory;
import org.elasticsearch.indices.analysis.AnalysisModule.AnalysisProvider;
import org.elasticsearch.indices.analysis.PreBuiltCacheFactory.CachingStrategy;

/** The analyzers that the bare server lacks. Not here: {@code snowball}, which stock has deprecated. */
final class Analyzers {
    private static final Map<String, Language> LANGUAGES = new LinkedHashMap<>();

    static {
        put("arabic", ArabicAnalyzer::getDefaultStopSet, ArabicAnalyzer::new);
        put("armenian", ArmenianAnalyzer::getDefaultStopSet, ArmenianAnalyzer::new);
        put("basque", BasqueAnalyzer::getDefaultStopSet, BasqueAnalyzer::new);
        put("bengali", BengaliAnalyzer::getDefaultStopSet, BengaliAnalyzer::new);
        put("brazilian", BrazilianAnalyzer::getDefaultStopSet, BrazilianAnalyzer::new);
        put("bulgarian", BulgarianAnalyzer::getDefaultStopSet, BulgarianAnalyzer::new);
        put("catalan", CatalanAnalyzer::getDefaultStopSet, CatalanAnalyzer::new);
        put("cjk", CJKAnalyzer::getDefaultStopSet, (stop, exclusion) -> new CJKAnalyzer(stop));
        put("czech", CzechAnalyzer::getDefaultStopSet, CzechAnalyzer::new);
        put("danish", DanishAnalyzer::getDefaultStopSet, DanishAnalyzer::new);
        put("dutch", DutchAnalyzer::getDefaultStopSet, DutchAnalyzer::new);
        put("english", EnglishAnalyzer::getDefaultStopSet, EnglishAnalyzer::new);
        put("estonian", EstonianAnalyzer::getDefaultStopSet, EstonianAnalyzer::new);
        put("finnish", FinnishAnalyzer::getDefaultStopSet, FinnishAnalyzer::new);
        put("french", FrenchAnalyzer::getDefaultStopSet, FrenchAnalyzer::new);
        put("galician", GalicianAnalyzer::getDefaultStopSet, GalicianAnalyzer::new);
        put("german", GermanAnalyzer::getDefaultStopSet, GermanAnalyzer::new);
        put("greek", GreekAnalyzer::getDefaultStopSet, (stop, exclusion) -> new GreekAnalyzer(stop));
        put("hindi", HindiAnalyzer::getDefaultStopSet, HindiAnalyzer::new);
        put("hungarian", HungarianAnalyzer::getDefaultStopSet, HungarianAnalyzer::new);
        put("indonesian", IndonesianAnalyzer::getDefaultStopSet, IndonesianAnalyzer::new);
        put("irish", IrishAnalyzer::getDefaultStopSet, IrishAnalyzer::new);
        put("italian", ItalianAnalyzer::getDefaultStopSet, ItalianAnalyzer::new);
        put("latvian", LatvianAnalyzer::getDefaultStopSet, LatvianAnalyzer::new);
        put("lithuanian", LithuanianAnalyzer::getDefaultStopSet, LithuanianAnalyzer::new);
        put("norwegian", NorwegianAnalyzer::getDefaultStopSet, NorwegianAnalyzer::new);
        put("persian", PersianAnalyzer::getDefaultStopSet, PersianAnalyzer::new);
        put("portuguese", PortugueseAnalyzer::getDefaultStopSet, PortugueseAnalyzer::new);
        put("romanian", RomanianAnalyzer::getDefaultStopSet, RomanianAnalyzer::new);
        put("russian", RussianAnalyzer::getDefaultStopSet, RussianAnalyzer::new);
        put("sorani", SoraniAnalyzer::getDefaultStopSet, SoraniAnalyzer::new);
        put("spanish", SpanishAnalyzer::getDefaultStopSet, SpanishAnalyzer::new);
        put("swedish", SwedishAnalyzer::getDefaultStopSet, SwedishAnalyzer::new);
        put("thai", ThaiAnalyzer::getDefaultStopSet, (stop, exclusion) -> new ThaiAnalyzer(stop));
        put("turkish", TurkishAnalyzer::getDefaultStopSet, TurkishAnalyzer::new);
    }

    private Analyzers() {}

    static Map<String, AnalysisProvider<AnalyzerProvider<? extends Analyzer>>> configurable() {
        Map<String, AnalysisProvider<AnalyzerProvider<? extends Analyzer>>> analyzers = new TreeMap<>();
        LANGUAGES.forEach((name, language) -> analyzers.put(name, of(options -> language.make().of(
            Analysis.parseStopWords(options.environment(), options.settings(), language.stopWords().get()),
            Analysis.parseStemExclusion(options.settings(), CharArraySet.EMPTY_SET)))));
        analyzers.put("chinese", of(options -> chinese()));
        analyzers.put("fingerprint", of(options -> {
            CharArraySet stop = Analysis.parseStopWords(options.environment(), options.settings(), CharArraySet.EMPTY_SET);
            int most = options.number("max_output_size", 255);
            char separator = separator(options.settings());
            return new Chain(StandardTokenizer::new, tokens -> new FingerprintFilter(
                new StopFilter(new ASCIIFoldingFilter(new LowerCaseFilter(tokens), false), stop), most, separator));
        }));
        analyzers.put("keyword", of(options -> new KeywordAnalyzer()));
        analyzers.put("pattern", of(options -> {
            CharArraySet stop = Analysis.parseStopWords(options.environment(), options.settings(), CharArraySet.EMPTY_SET);
            return patterns(options.pattern("\\W+"), options.flag("lowercase", true), stop);
        }));
        analyzers.put("simple", of(options -> new SimpleAnalyzer()));
        analyzers.put("stop", of(options -> new StopAnalyzer(
            Analysis.parseStopWords(options.environment(), options.settings(), EnglishAnalyzer.ENGLISH_STOP_WORDS_SET))));
        analyzers.put("whitespace", of(options -> new WhitespaceAnalyzer()));
        return analyzers;
    }

    static List<PreBuiltAnalyzerProviderFactory> ready() {
        List<PreBuiltAnalyzerProviderFactory> analyzers = new ArrayList<>();
        LANGUAGES.forEach((name, language) -> analyzers.add(ready(
            name, () -> language.make().of(language.stopWords().get(), CharArraySet.EMPTY_SET))));
        analyzers.add(ready("chinese", Analyzers::chinese));
        analyzers.add(ready("pattern", () -> patterns(Pattern.compile("\\W+"), true, CharArraySet.EMPTY_SET)));
        return analyzers;
    }

    static char separator(Settings settings) {
        String given = settings.get("separator", " ");
        if (given.length() > 1) {
            throw new IllegalArgumentException("Setting [separator] must be a single, non-null character. [" + given + "] was provided.");
        }
        return given.isEmpty() ? ' ' : given.charAt(0);
    }

    /** Stock's analyzer of that name knows no Chinese: it cuts single characters and drops English stop words. */
    private static Analyzer chinese() {
        return new StandardAnalyzer(EnglishAnalyzer.ENGLISH_STOP_WORDS_SET);
    }

    private static Analyzer patterns(Pattern pattern, boolean lowercase, CharArraySet stop) {
        return new Chain(() -> new PatternTokenizer(pattern, -1), tokens -> {
            TokenStream stream = lowercase ? new LowerCaseFilter(tokens) : tokens;
            return stop.isEmpty() ? stream : new StopFilter(stream, stop);
        });
    }

    private static void put(String name, Supplier<CharArraySet> stopWords, Make make) {
        LANGUAGES.put(name, new Language(stopWords, make));
    }

    private static PreBuiltAnalyzerProviderFactory ready(String name, Supplier<Analyzer> make) {
        return new PreBuiltAnalyzerProviderFactory(name, CachingStrategy.ONE, make);
    }

    private static AnalysisProvider<AnalyzerProvider<? extends Analyzer>> of(Function<Options, Analyzer> read) {
        return (index, environment, name, settings) ->
            new Fixed(name, read.apply(new Options(index, environment, name, settings)));
    }

    private interface Make {
        Analyzer of(CharArraySet stopWords, CharArraySet stemExclusion);
    }

    private record Language(Supplier<CharArraySet> stopWords, Make make) {}

    private static final class Fixed extends AbstractIndexAnalyzerProvider<Analyzer> {
        private final Analyzer analyzer;

        private Fixed(String name, Analyzer analyzer) {
            super(name);
            this.analyzer = analyzer;
        }

        @Override
        public Analyzer get() {
            return analyzer;
        }
    }

    private static final class Chain extends Analyzer {
        private final Supplier<Tokenizer> tokenizer;
        private final Function<TokenStream, TokenStream> filters;

        private Chain(Supplier<Tokenizer> tokenizer, Function<TokenStream, TokenStream> filters) {
            this.tokenizer = tokenizer;
            this.filters = filters;
        }

        @Override
        protected TokenStreamComponents createComponents(String field) {
            Tokenizer source = tokenizer.get();
            return new TokenStreamComponents(source, filters.apply(source));
        }

        @Override
        protected TokenStream normalize(String field, TokenStream input) {
            return new LowerCaseFilter(input);
        }
    }
}
