package halflife.node;

import java.util.List;
import java.util.regex.Pattern;
import org.elasticsearch.common.regex.Regex;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.env.Environment;
import org.elasticsearch.index.IndexSettings;

/** The settings of one analysis component, and where it stands. */
record Options(IndexSettings index, Environment environment, String name, Settings settings) {
    boolean flag(String key, boolean otherwise) {
        return settings.getAsBoolean(key, otherwise);
    }

    int number(String key, int otherwise) {
        return settings.getAsInt(key, otherwise);
    }

    String text(String key, String otherwise) {
        return settings.get(key, otherwise);
    }

    List<String> list(String key) {
        return settings.getAsList(key);
    }

    String required(String key) {
        String value = settings.get(key);
        if (value == null) {
            throw new IllegalArgumentException(key + " is missing for [" + name + "]");
        }
        return value;
    }

    Pattern pattern(String otherwise) {
        String expression = otherwise == null ? required("pattern") : settings.get("pattern", otherwise);
        return Regex.compile(expression, settings.get("flags"));
    }

    /** Stock's limit on the difference of gram sizes, index by index. */
    int[] gramSizes(boolean limited) {
        int least = number("min_gram", 1);
        int most = number("max_gram", 2);
        int allowed = index.getMaxNgramDiff();
        if (limited && most - least > allowed) {
            throw new IllegalArgumentException(
                "The difference between max_gram and min_gram in NGram Tokenizer must be less than or equal to: [" + allowed
                    + "] but was [" + (most - least) + "]. This limit can be set by changing the ["
                    + IndexSettings.MAX_NGRAM_DIFF_SETTING.getKey() + "] index level setting.");
        }
        return new int[] { least, most };
    }
}
