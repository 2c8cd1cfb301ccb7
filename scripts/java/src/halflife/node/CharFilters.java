package halflife.node;

import static org.elasticsearch.plugins.AnalysisPlugin.requiresAnalysisSettings;

import java.io.Reader;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.UnaryOperator;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.lucene.analysis.charfilter.HTMLStripCharFilter;
import org.apache.lucene.analysis.charfilter.MappingCharFilter;
import org.apache.lucene.analysis.charfilter.NormalizeCharMap;
import org.apache.lucene.analysis.pattern.PatternReplaceCharFilter;
import org.elasticsearch.index.analysis.AbstractCharFilterFactory;
import org.elasticsearch.index.analysis.Analysis;
import org.elasticsearch.index.analysis.CharFilterFactory;
import org.elasticsearch.index.analysis.NormalizingCharFilterFactory;
import org.elasticsearch.index.analysis.PreConfiguredCharFilter;
import org.elasticsearch.indices.analysis.AnalysisModule.AnalysisProvider;

/** The character filters that the bare server lacks. */
final class CharFilters {
    private static final Pattern RULE = Pattern.compile("(.*)\\s*=>\\s*(.*)\\s*$");

    private CharFilters() {}

    static Map<String, AnalysisProvider<CharFilterFactory>> configurable() {
        Map<String, AnalysisProvider<CharFilterFactory>> filters = new TreeMap<>();
        filters.put("html_strip", (index, environment, name, settings) -> {
            Set<String> kept = Set.copyOf(settings.getAsList("escaped_tags"));
            return new OnText(name, reader -> new HTMLStripCharFilter(reader, kept.isEmpty() ? null : kept));
        });
        filters.put("mapping", requiresAnalysisSettings((index, environment, name, settings) -> {
            List<String> rules = Analysis.getWordList(environment, settings, "mappings");
            if (rules == null) {
                throw new IllegalArgumentException("mapping requires either `mappings` or `mappings_path` to be configured");
            }
            NormalizeCharMap map = map(rules);
            return new OnTerms(name, reader -> new MappingCharFilter(map, reader));
        }));
        filters.put("pattern_replace", requiresAnalysisSettings((index, environment, name, settings) -> {
            Pattern pattern = new Options(index, environment, name, settings).pattern(null);
            String replacement = settings.get("replacement", "");
            return new OnTerms(name, reader -> new PatternReplaceCharFilter(pattern, replacement, reader));
        }));
        return filters;
    }

    static List<PreConfiguredCharFilter> ready() {
        return List.of(PreConfiguredCharFilter.singleton("html_strip", false, HTMLStripCharFilter::new));
    }

    private static NormalizeCharMap map(List<String> rules) {
        NormalizeCharMap.Builder map = new NormalizeCharMap.Builder();
        for (String rule : rules) {
            Matcher sides = RULE.matcher(rule);
            if (sides.find() == false) {
                throw new IllegalArgumentException("Invalid Mapping Rule : [" + rule + "]");
            }
            map.add(Escapes.undo(sides.group(1).strip()), Escapes.undo(sides.group(2).strip()));
        }
        return map.build();
    }

    private static class OnText extends AbstractCharFilterFactory {
        private final UnaryOperator<Reader> make;

        private OnText(String name, UnaryOperator<Reader> make) {
            super(name);
            this.make = make;
        }

        @Override
        public Reader create(Reader reader) {
            return make.apply(reader);
        }
    }

    /** Also applied to the terms of normalizers and wildcard queries. */
    private static final class OnTerms extends OnText implements NormalizingCharFilterFactory {
        private OnTerms(String name, UnaryOperator<Reader> make) {
            super(name, make);
        }
    }
}
