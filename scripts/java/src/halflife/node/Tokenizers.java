package halflife.node;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.Function;
import java.util.function.IntPredicate;
import java.util.function.Supplier;
import java.util.regex.Pattern;
import org.apache.lucene.analysis.Tokenizer;
import org.apache.lucene.analysis.classic.ClassicTokenizer;
import org.apache.lucene.analysis.core.KeywordTokenizer;
import org.apache.lucene.analysis.core.LetterTokenizer;
import org.apache.lucene.analysis.core.WhitespaceTokenizer;
import org.apache.lucene.analysis.email.UAX29URLEmailTokenizer;
import org.apache.lucene.analysis.ngram.EdgeNGramTokenizer;
import org.apache.lucene.analysis.ngram.NGramTokenizer;
import org.apache.lucene.analysis.path.PathHierarchyTokenizer;
import org.apache.lucene.analysis.path.ReversePathHierarchyTokenizer;
import org.apache.lucene.analysis.pattern.PatternTokenizer;
import org.apache.lucene.analysis.pattern.SimplePatternSplitTokenizer;
import org.apache.lucene.analysis.pattern.SimplePatternTokenizer;
import org.apache.lucene.analysis.th.ThaiTokenizer;
import org.apache.lucene.analysis.util.CharTokenizer;
import org.apache.lucene.util.AttributeFactory;
import org.elasticsearch.common.regex.Regex;
import org.elasticsearch.index.analysis.PreConfiguredTokenizer;
import org.elasticsearch.index.analysis.TokenizerFactory;
import org.elasticsearch.indices.analysis.AnalysisModule.AnalysisProvider;

/** The tokenizers that the bare server lacks. Not here: {@code lowercase}, for which there is a filter. */
final class Tokenizers {
    private static final AttributeFactory ATTRIBUTES = AttributeFactory.DEFAULT_ATTRIBUTE_FACTORY;
    private static final int LONGEST_TOKEN = 255;

    private Tokenizers() {}

    static Map<String, AnalysisProvider<TokenizerFactory>> configurable() {
        Map<String, AnalysisProvider<TokenizerFactory>> tokenizers = new TreeMap<>();
        tokenizers.put("char_group", of(options -> {
            int longest = options.number("max_token_length", LONGEST_TOKEN);
            IntPredicate separator = separators(options.list("tokenize_on_chars"));
            return () -> new CharTokenizer(ATTRIBUTES, longest) {
                @Override
                protected boolean isTokenChar(int character) {
                    return separator.test(character) == false;
                }
            };
        }));
        tokenizers.put("classic", of(options -> {
            int longest = options.number("max_token_length", LONGEST_TOKEN);
            return () -> {
                ClassicTokenizer tokenizer = new ClassicTokenizer();
                tokenizer.setMaxTokenLength(longest);
                return tokenizer;
            };
        }));
        tokenizers.put("edge_ngram", of(options -> {
            int[] sizes = options.gramSizes(false);
            IntPredicate kept = CharacterClasses.read(options);
            return () -> new EdgeNGramTokenizer(sizes[0], sizes[1]) {
                @Override
                protected boolean isTokenChar(int character) {
                    return kept.test(character);
                }
            };
        }));
        tokenizers.put("keyword", of(options -> {
            int buffer = options.number("buffer_size", 256);
            return () -> new KeywordTokenizer(buffer);
        }));
        tokenizers.put("letter", of(options -> LetterTokenizer::new));
        tokenizers.put("ngram", of(options -> {
            int[] sizes = options.gramSizes(true);
            IntPredicate kept = CharacterClasses.read(options);
            return () -> new NGramTokenizer(sizes[0], sizes[1]) {
                @Override
                protected boolean isTokenChar(int character) {
                    return kept.test(character);
                }
            };
        }));
        tokenizers.put("path_hierarchy", of(Tokenizers::paths));
        tokenizers.put("PathHierarchy", of(Tokenizers::paths));
        tokenizers.put("pattern", of(options -> {
            Pattern pattern = options.pattern("\\W+");
            int group = options.number("group", -1);
            return () -> new PatternTokenizer(pattern, group);
        }));
        tokenizers.put("simple_pattern", of(options -> {
            String pattern = options.text("pattern", "");
            return () -> new SimplePatternTokenizer(pattern);
        }));
        tokenizers.put("simple_pattern_split", of(options -> {
            String pattern = options.text("pattern", "");
            return () -> new SimplePatternSplitTokenizer(pattern);
        }));
        tokenizers.put("thai", of(options -> ThaiTokenizer::new));
        tokenizers.put("uax_url_email", of(options -> {
            int longest = options.number("max_token_length", LONGEST_TOKEN);
            return () -> {
                UAX29URLEmailTokenizer tokenizer = new UAX29URLEmailTokenizer();
                tokenizer.setMaxTokenLength(longest);
                return tokenizer;
            };
        }));
        tokenizers.put("whitespace", of(options -> {
            int longest = options.number("max_token_length", LONGEST_TOKEN);
            return () -> new WhitespaceTokenizer(ATTRIBUTES, longest);
        }));
        return tokenizers;
    }

    static List<PreConfiguredTokenizer> ready() {
        Map<String, Supplier<Tokenizer>> named = Map.ofEntries(
            Map.entry("classic", ClassicTokenizer::new),
            Map.entry("edge_ngram", () -> new EdgeNGramTokenizer(1, 2)),
            Map.entry("keyword", KeywordTokenizer::new),
            Map.entry("letter", LetterTokenizer::new),
            Map.entry("ngram", NGramTokenizer::new),
            Map.entry("path_hierarchy", PathHierarchyTokenizer::new),
            Map.entry("PathHierarchy", PathHierarchyTokenizer::new),
            Map.entry("pattern", () -> new PatternTokenizer(Regex.compile("\\W+", null), -1)),
            Map.entry("thai", ThaiTokenizer::new),
            Map.entry("uax_url_email", UAX29URLEmailTokenizer::new),
            Map.entry("whitespace", WhitespaceTokenizer::new));
        List<PreConfiguredTokenizer> tokenizers = new ArrayList<>();
        named.forEach((name, make) -> tokenizers.add(PreConfiguredTokenizer.singleton(name, make)));
        return tokenizers;
    }

    private static AnalysisProvider<TokenizerFactory> of(Function<Options, Supplier<Tokenizer>> read) {
        return (index, environment, name, settings) ->
            TokenizerFactory.newFactory(name, read.apply(new Options(index, environment, name, settings)));
    }

    private static Supplier<Tokenizer> paths(Options options) {
        int buffer = options.number("buffer_size", 1024);
        int skip = options.number("skip", 0);
        String delimiter = options.text("delimiter", "/");
        if (delimiter.length() != 1) {
            throw new IllegalArgumentException("delimiter must be a one char value");
        }
        String replacement = options.text("replacement", delimiter);
        if (replacement.length() != 1) {
            throw new IllegalArgumentException("replacement must be a one char value");
        }
        char from = delimiter.charAt(0);
        char to = replacement.charAt(0);
        if (options.flag("reverse", false)) {
            return () -> new ReversePathHierarchyTokenizer(buffer, from, to, skip);
        }
        return () -> new PathHierarchyTokenizer(buffer, from, to, skip);
    }

    /** What {@code char_group} splits on: single characters, escapes, and names of classes. */
    private static IntPredicate separators(List<String> given) {
        Set<Integer> characters = new HashSet<>();
        IntPredicate classes = character -> false;
        for (String one : given) {
            if (one == null || one.isEmpty()) {
                throw new IllegalArgumentException("[tokenize_on_chars] cannot contain empty characters");
            }
            if (one.length() == 1) {
                characters.add((int) one.charAt(0));
            } else if (one.charAt(0) == '\\') {
                characters.add((int) Escapes.undo(one).charAt(0));
            } else if (CharacterClasses.BASIC.containsKey(one)) {
                classes = classes.or(CharacterClasses.BASIC.get(one));
            } else {
                throw new IllegalArgumentException("Invalid escaped char in [" + one + "]");
            }
        }
        return classes.or(characters::contains);
    }
}
