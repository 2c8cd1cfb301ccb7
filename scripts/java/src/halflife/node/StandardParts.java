package halflife.node;

import static org.elasticsearch.plugins.AnalysisPlugin.requiresAnalysisSettings;

import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.function.Predicate;
import java.util.function.Supplier;
import org.apache.lucene.analysis.Analyzer;
import org.elasticsearch.cluster.node.DiscoveryNodes;
import org.elasticsearch.cluster.service.ClusterService;
import org.elasticsearch.features.NodeFeature;
import org.elasticsearch.index.analysis.AnalyzerProvider;
import org.elasticsearch.index.analysis.CharFilterFactory;
import org.elasticsearch.index.analysis.PreBuiltAnalyzerProviderFactory;
import org.elasticsearch.index.analysis.PreConfiguredCharFilter;
import org.elasticsearch.index.analysis.PreConfiguredTokenFilter;
import org.elasticsearch.index.analysis.PreConfiguredTokenizer;
import org.elasticsearch.index.analysis.TokenFilterFactory;
import org.elasticsearch.index.analysis.TokenizerFactory;
import org.elasticsearch.indices.analysis.AnalysisModule.AnalysisProvider;
import org.elasticsearch.node.Node;
import org.elasticsearch.plugins.ActionPlugin;
import org.elasticsearch.plugins.AnalysisPlugin;
import org.elasticsearch.plugins.Plugin;
import org.elasticsearch.rest.RestHandler;
import org.elasticsearch.synonyms.SynonymsManagementAPIService;

/** The parts of a stock distribution that its bare server lacks and that clients and templates take for granted. */
public final class StandardParts extends Plugin implements ActionPlugin, AnalysisPlugin {
    private ClusterService clusterService;
    private SynonymsManagementAPIService synonymSets;

    @Override
    public Collection<?> createComponents(PluginServices services) {
        clusterService = services.clusterService();
        synonymSets = new SynonymsManagementAPIService(services.client(), services.clusterService(), services.featureService());
        return List.of();
    }

    @Override
    public Collection<RestHandler> getRestHandlers(
        RestHandlersServices services, Supplier<DiscoveryNodes> nodes, Predicate<NodeFeature> features) {
        return List.of(new Root(Node.NODE_NAME_SETTING.get(services.settings()), clusterService::state));
    }

    @Override
    public Map<String, AnalysisProvider<CharFilterFactory>> getCharFilters() {
        return CharFilters.configurable();
    }

    @Override
    public Map<String, AnalysisProvider<TokenizerFactory>> getTokenizers() {
        return Tokenizers.configurable();
    }

    @Override
    public Map<String, AnalysisProvider<TokenFilterFactory>> getTokenFilters() {
        Map<String, AnalysisProvider<TokenFilterFactory>> filters = Filters.configurable();
        filters.put("multiplexer", (index, environment, name, settings) -> new Multiplexer(name, settings));
        filters.put("synonym", requiresAnalysisSettings(
            (index, environment, name, settings) -> new Synonyms(false, environment, name, settings, synonymSets)));
        filters.put("synonym_graph", requiresAnalysisSettings(
            (index, environment, name, settings) -> new Synonyms(true, environment, name, settings, synonymSets)));
        return filters;
    }

    @Override
    public Map<String, AnalysisProvider<AnalyzerProvider<? extends Analyzer>>> getAnalyzers() {
        return Analyzers.configurable();
    }

    @Override
    public List<PreConfiguredCharFilter> getPreConfiguredCharFilters() {
        return CharFilters.ready();
    }

    @Override
    public List<PreConfiguredTokenizer> getPreConfiguredTokenizers() {
        return Tokenizers.ready();
    }

    @Override
    public List<PreConfiguredTokenFilter> getPreConfiguredTokenFilters() {
        return Filters.ready();
    }

    @Override
    public List<PreBuiltAnalyzerProviderFactory> getPreBuiltAnalyzerProviderFactories() {
        return Analyzers.ready();
    }
}
