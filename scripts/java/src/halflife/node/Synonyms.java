package halflife.node;

import java.io.IOException;
import java.io.Reader;
import java.io.StringReader;
import java.text.ParseException;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.function.Function;
import org.apache.logging.log4j.LogManager;
import org.apache.lucene.analysis.Analyzer;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.synonym.SolrSynonymParser;
import org.apache.lucene.analysis.synonym.SynonymFilter;
import org.apache.lucene.analysis.synonym.SynonymGraphFilter;
import org.apache.lucene.analysis.synonym.SynonymMap;
import org.apache.lucene.analysis.synonym.WordnetSynonymParser;
import org.apache.lucene.util.CharsRef;
import org.apache.lucene.util.CharsRefBuilder;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.env.Environment;
import org.elasticsearch.index.IndexService.IndexCreationContext;
import org.elasticsearch.index.analysis.AbstractTokenFilterFactory;
import org.elasticsearch.index.analysis.Analysis;
import org.elasticsearch.index.analysis.AnalysisMode;
import org.elasticsearch.index.analysis.CharFilterFactory;
import org.elasticsearch.index.analysis.CustomAnalyzer;
import org.elasticsearch.index.analysis.TokenFilterFactory;
import org.elasticsearch.index.analysis.TokenizerFactory;
import org.elasticsearch.synonyms.SynonymsManagementAPIService;

/**
 * {@code synonym} and {@code synonym_graph}. Rules come from the settings, from a file in the configuration folder, or
 * from a synonym set of the cluster; they are read through the analyzer's own tokenizer and the filters before this one.
 */
final class Synonyms extends AbstractTokenFilterFactory {
    private final boolean graph;
    private final Settings settings;
    private final Environment environment;
    private final SynonymsManagementAPIService sets;
    private final AnalysisMode mode;
    private final boolean lenient;

    Synonyms(boolean graph, Environment environment, String name, Settings settings, SynonymsManagementAPIService sets) {
        super(name);
        this.graph = graph;
        this.settings = settings;
        this.environment = environment;
        this.sets = sets;
        boolean updateable = settings.getAsBoolean("updateable", false);
        mode = updateable ? AnalysisMode.SEARCH_TIME : AnalysisMode.ALL;
        lenient = settings.getAsBoolean("lenient", updateable);
        if (settings.hasValue("synonyms") == false && settings.hasValue("synonyms_set") == false && settings.hasValue("synonyms_path") == false) {
            throw new IllegalArgumentException("synonym requires either `synonyms`, `synonyms_set` or `synonyms_path` to be configured");
        }
    }

    @Override
    public AnalysisMode getAnalysisMode() {
        return mode;
    }

    @Override
    public TokenStream create(TokenStream input) {
        throw new UnsupportedOperationException("the rules of [" + name() + "] can be read only inside an analyzer");
    }

    @Override
    public TokenFilterFactory getChainAwareTokenFilterFactory(
        IndexCreationContext context,
        TokenizerFactory tokenizer,
        List<CharFilterFactory> charFilters,
        List<TokenFilterFactory> before,
        Function<String, TokenFilterFactory> named) {
        Analyzer analyzer = new CustomAnalyzer(
            tokenizer,
            charFilters.toArray(CharFilterFactory[]::new),
            before.stream().map(TokenFilterFactory::getSynonymFilter).toArray(TokenFilterFactory[]::new));
        return new InAnalyzer(name(), graph, mode, read(analyzer, context), resources());
    }

    private Set<String> resources() {
        if (settings.hasValue("synonyms")) {
            return Set.of();
        }
        if (settings.hasValue("synonyms_set")) {
            return new TreeSet<>(settings.getAsList("synonyms_set"));
        }
        return Set.of(settings.get("synonyms_path"));
    }

    private SynonymMap read(Analyzer analyzer, IndexCreationContext context) {
        String origin = settings.hasValue("synonyms") ? "'" + name() + "' analyzer settings" : resources().toString();
        boolean expand = settings.getAsBoolean("expand", true);
        try (Reader rules = open(context)) {
            if ("wordnet".equalsIgnoreCase(settings.get("format", ""))) {
                Wordnet parser = new Wordnet(expand, analyzer);
                parser.parse(rules);
                return parser.build();
            }
            Solr parser = new Solr(expand, analyzer);
            parser.parse(rules);
            return parser.build();
        } catch (IOException | ParseException | RuntimeException failure) {
            throw new IllegalArgumentException("failed to build synonyms from [" + origin + "]", failure);
        }
    }

    private Reader open(IndexCreationContext context) throws IOException {
        if (settings.hasValue("synonyms")) {
            return new StringReader(String.join("\n", Analysis.getWordList(environment, settings, "synonyms")));
        }
        if (settings.hasValue("synonyms_path") && settings.hasValue("synonyms_set") == false) {
            // The server appends "_path" to the key in its messages.
            return Analysis.getReaderFromFile(environment, settings.get("synonyms_path"), "synonyms");
        }
        if (mode != AnalysisMode.SEARCH_TIME) {
            throw new IllegalArgumentException(
                "Can't apply [synonyms_set]! Loading synonyms from index is supported only for search time synonyms!");
        }
        // A set is read from an index. Only a reload may wait for that; elsewhere it would block the master's own thread.
        return context == IndexCreationContext.RELOAD_ANALYZERS
            ? Analysis.getReaderFromIndex(resources(), sets, lenient)
            : new StringReader("");
    }

    /** Leave out what a rule's word is reduced to nothing (a stop word, say), or one that cannot be analysed, if lenient. */
    private CharsRef analyzed(Analysed analyse, String text) throws IOException {
        try {
            return analyse.run();
        } catch (IllegalArgumentException failure) {
            if (lenient == false) {
                throw failure;
            }
            LogManager.getLogger(Synonyms.class).info("synonym rule for [{}] was ignored", text);
            return new CharsRef("");
        }
    }

    private boolean wanted(CharsRef input, CharsRef output) {
        return lenient == false || (input.length > 0 && output.length > 0);
    }

    private interface Analysed {
        CharsRef run() throws IOException;
    }

    private final class Solr extends SolrSynonymParser {
        private Solr(boolean expand, Analyzer analyzer) {
            super(true, expand, analyzer);
        }

        @Override
        public CharsRef analyze(String text, CharsRefBuilder reuse) throws IOException {
            return analyzed(() -> super.analyze(text, reuse), text);
        }

        @Override
        public void add(CharsRef input, CharsRef output, boolean includeOrig) {
            if (wanted(input, output)) {
                super.add(input, output, includeOrig);
            }
        }
    }

    private final class Wordnet extends WordnetSynonymParser {
        private Wordnet(boolean expand, Analyzer analyzer) {
            super(true, expand, analyzer);
        }

        @Override
        public CharsRef analyze(String text, CharsRefBuilder reuse) throws IOException {
            return analyzed(() -> super.analyze(text, reuse), text);
        }

        @Override
        public void add(CharsRef input, CharsRef output, boolean includeOrig) {
            if (wanted(input, output)) {
                super.add(input, output, includeOrig);
            }
        }
    }

    /** The filter with its rules read. A later synonym filter doesn't see it: rules are not applied to rules. */
    private record InAnalyzer(String name, boolean graph, AnalysisMode mode, SynonymMap rules, Set<String> resources)
        implements TokenFilterFactory {
        @Override
        public TokenStream create(TokenStream input) {
            if (rules.fst == null) {
                return input;
            }
            return graph ? new SynonymGraphFilter(input, rules, false) : new SynonymFilter(input, rules, false);
        }

        @Override
        public TokenFilterFactory getSynonymFilter() {
            return IDENTITY_FILTER;
        }

        @Override
        public AnalysisMode getAnalysisMode() {
            return mode;
        }

        @Override
        public Set<String> getResourceNames() {
            return resources;
        }
    }
}
