package halflife.node;

import java.io.IOException;
import java.util.List;
import java.util.function.Supplier;
import org.elasticsearch.Build;
import org.elasticsearch.client.internal.node.NodeClient;
import org.elasticsearch.cluster.ClusterState;
import org.elasticsearch.cluster.metadata.Metadata;
import org.elasticsearch.index.IndexVersion;
import org.elasticsearch.rest.BaseRestHandler;
import org.elasticsearch.rest.RestRequest;
import org.elasticsearch.rest.RestResponse;
import org.elasticsearch.rest.RestStatus;
import org.elasticsearch.xcontent.XContentBuilder;

/** {@code GET /} and {@code HEAD /}: who is this node, in the form every Elasticsearch client expects. */
final class Root extends BaseRestHandler {
    private final String nodeName;
    private final Supplier<ClusterState> state;

    Root(String nodeName, Supplier<ClusterState> state) {
        this.nodeName = nodeName;
        this.state = state;
    }

    @Override
    public String getName() {
        return "halflife_root";
    }

    @Override
    public List<Route> routes() {
        return List.of(new Route(RestRequest.Method.GET, "/"), new Route(RestRequest.Method.HEAD, "/"));
    }

    /** Like stock: a full heap must not keep a client from asking who is there. */
    @Override
    public boolean canTripCircuitBreaker() {
        return false;
    }

    @Override
    protected RestChannelConsumer prepareRequest(RestRequest request, NodeClient client) {
        boolean indent = request.hasParam("pretty") == false;
        return channel -> {
            XContentBuilder body = channel.newBuilder();
            if (indent) {
                body.prettyPrint().lfAtEnd();
            }
            channel.sendResponse(new RestResponse(RestStatus.OK, describe(body)));
        };
    }

    private XContentBuilder describe(XContentBuilder body) throws IOException {
        ClusterState now = state.get();
        Metadata metadata = now.metadata();
        Build build = Build.current();
        body.startObject();
        body.field("name", nodeName);
        body.field("cluster_name", now.getClusterName().value());
        body.field("cluster_uuid", metadata.clusterUUIDCommitted() ? metadata.clusterUUID() : Metadata.UNKNOWN_CLUSTER_UUID);
        body.startObject("version");
        body.field("number", build.qualifiedVersion());
        body.field("build_flavor", build.flavor());
        body.field("build_type", build.type().displayName());
        body.field("build_hash", build.hash());
        body.field("build_date", build.date());
        body.field("build_snapshot", build.isSnapshot());
        body.field("lucene_version", IndexVersion.current().luceneVersion().toString());
        body.field("minimum_wire_compatibility_version", build.minWireCompatVersion());
        body.field("minimum_index_compatibility_version", build.minIndexCompatVersion());
        body.endObject();
        body.field("tagline", "You Know, for Search");
        return body.endObject();
    }
}
