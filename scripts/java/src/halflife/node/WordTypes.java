package halflife.node;

import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.lucene.analysis.CharArraySet;
import org.apache.lucene.analysis.miscellaneous.WordDelimiterFilter;
import org.apache.lucene.analysis.miscellaneous.WordDelimiterGraphFilter;
import org.apache.lucene.analysis.miscellaneous.WordDelimiterIterator;
import org.elasticsearch.index.analysis.Analysis;

/** What the two word delimiter filters share: flags, character types and protected words. */
final class WordTypes {
    private static final Pattern RULE = Pattern.compile("(.*)\\s*=>\\s*(.*)\\s*$");
    private static final Map<String, Integer> FLAGS = new LinkedHashMap<>();
    private static final Set<String> ON_BY_DEFAULT = Set.of(
        "generate_word_parts", "generate_number_parts", "split_on_case_change", "split_on_numerics", "stem_english_possessive");
    /** Lucene keeps the numbers of the character types to itself, so they are asked for by example. */
    private static final Map<String, Byte> TYPES = Map.of(
        "LOWER", type('a'), "UPPER", type('A'), "ALPHA", (byte) WordDelimiterIterator.ALPHA, "DIGIT", type('0'),
        "ALPHANUM", (byte) WordDelimiterIterator.ALPHANUM, "SUBWORD_DELIM", type('-'));

    static {
        FLAGS.put("generate_word_parts", WordDelimiterGraphFilter.GENERATE_WORD_PARTS);
        FLAGS.put("generate_number_parts", WordDelimiterGraphFilter.GENERATE_NUMBER_PARTS);
        FLAGS.put("catenate_words", WordDelimiterGraphFilter.CATENATE_WORDS);
        FLAGS.put("catenate_numbers", WordDelimiterGraphFilter.CATENATE_NUMBERS);
        FLAGS.put("catenate_all", WordDelimiterGraphFilter.CATENATE_ALL);
        FLAGS.put("split_on_case_change", WordDelimiterGraphFilter.SPLIT_ON_CASE_CHANGE);
        FLAGS.put("preserve_original", WordDelimiterGraphFilter.PRESERVE_ORIGINAL);
        FLAGS.put("split_on_numerics", WordDelimiterGraphFilter.SPLIT_ON_NUMERICS);
        FLAGS.put("stem_english_possessive", WordDelimiterGraphFilter.STEM_ENGLISH_POSSESSIVE);
    }

    private WordTypes() {}

    private static byte type(char example) {
        return WordDelimiterIterator.getType(example);
    }

    static int flags(Options options) {
        int flags = 0;
        for (Map.Entry<String, Integer> flag : FLAGS.entrySet()) {
            if (options.flag(flag.getKey(), ON_BY_DEFAULT.contains(flag.getKey()))) {
                flags |= flag.getValue();
            }
        }
        return flags;
    }

    /** The same flags for the older filter, which numbers them alike; said here so that the compiler checks it. */
    static int legacy(int flags) {
        if (WordDelimiterFilter.STEM_ENGLISH_POSSESSIVE != WordDelimiterGraphFilter.STEM_ENGLISH_POSSESSIVE) {
            throw new IllegalStateException("the two word delimiter filters number their flags differently");
        }
        return flags;
    }

    static CharArraySet protectedWords(Options options) {
        Set<?> words = Analysis.getWordSet(options.environment(), options.settings(), "protected_words");
        return words == null ? null : CharArraySet.copy(words);
    }

    static byte[] table(Options options) {
        List<String> rules = Analysis.getWordList(options.environment(), options.settings(), "type_table");
        if (rules == null) {
            return WordDelimiterIterator.DEFAULT_WORD_DELIM_TABLE;
        }
        Map<Character, Byte> types = new LinkedHashMap<>();
        for (String rule : rules) {
            Matcher sides = RULE.matcher(rule);
            String left = sides.find() ? Escapes.undo(sides.group(1).strip()) : "";
            Byte type = left.isEmpty() ? null : TYPES.get(sides.group(2).strip());
            if (left.length() != 1 || type == null) {
                throw new IllegalArgumentException("Invalid Mapping Rule : [" + rule + "]");
            }
            types.put(left.charAt(0), type);
        }
        byte[] defaults = WordDelimiterIterator.DEFAULT_WORD_DELIM_TABLE;
        int last = types.keySet().stream().mapToInt(Character::charValue).max().orElse(0);
        byte[] table = Arrays.copyOf(defaults, Math.max(defaults.length, last + 1));
        for (int code = defaults.length; code < table.length; code++) {
            table[code] = WordDelimiterIterator.getType(code);
        }
        types.forEach((character, type) -> table[character] = type);
        return table;
    }
}
