package halflife.node;

import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.function.Function;
import org.apache.lucene.analysis.TokenFilter;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.miscellaneous.ConditionalTokenFilter;
import org.apache.lucene.analysis.miscellaneous.RemoveDuplicatesTokenFilter;
import org.apache.lucene.analysis.tokenattributes.PositionIncrementAttribute;
import org.elasticsearch.common.Strings;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.index.IndexService.IndexCreationContext;
import org.elasticsearch.index.analysis.AbstractTokenFilterFactory;
import org.elasticsearch.index.analysis.CharFilterFactory;
import org.elasticsearch.index.analysis.TokenFilterFactory;
import org.elasticsearch.index.analysis.TokenizerFactory;

/** {@code multiplexer}: each token once through each of several chains of filters, all at the same position. */
final class Multiplexer extends AbstractTokenFilterFactory {
    private final List<String> chains;
    private final boolean preserveOriginal;

    Multiplexer(String name, Settings settings) {
        super(name);
        chains = settings.getAsList("filters");
        preserveOriginal = settings.getAsBoolean("preserve_original", true);
    }

    @Override
    public TokenStream create(TokenStream input) {
        throw new UnsupportedOperationException("the chains of [" + name() + "] are known only inside an analyzer");
    }

    @Override
    public TokenFilterFactory getSynonymFilter() {
        throw Filter.refusal(name());
    }

    @Override
    public TokenFilterFactory getChainAwareTokenFilterFactory(
        IndexCreationContext context,
        TokenizerFactory tokenizer,
        List<CharFilterFactory> charFilters,
        List<TokenFilterFactory> before,
        Function<String, TokenFilterFactory> named) {
        List<List<TokenFilterFactory>> resolved = new ArrayList<>();
        if (preserveOriginal) {
            resolved.add(List.of());
        }
        for (String chain : chains) {
            List<TokenFilterFactory> earlier = new ArrayList<>(before);
            List<TokenFilterFactory> links = new ArrayList<>();
            for (String link : Strings.tokenizeToStringArray(chain, ",")) {
                TokenFilterFactory factory = named.apply(link);
                if (factory == null) {
                    throw new IllegalArgumentException("Multiplexing filter [" + name() + "] refers to undefined tokenfilter [" + link + "]");
                }
                factory = factory.getChainAwareTokenFilterFactory(context, tokenizer, charFilters, earlier, named);
                links.add(factory);
                earlier.add(factory);
            }
            resolved.add(links);
        }
        return Filter.notBeforeSynonyms(name(), input -> new RemoveDuplicatesTokenFilter(multiply(input, resolved)));
    }

    private static TokenStream multiply(TokenStream input, List<List<TokenFilterFactory>> chains) {
        Repeat repeat = new Repeat(input, chains.size());
        TokenStream stream = repeat;
        for (int chain = 0; chain < chains.size(); chain++) {
            List<TokenFilterFactory> links = chains.get(chain);
            if (links.isEmpty() == false) {
                stream = new Only(stream, repeat, chain, links);
            }
        }
        return stream;
    }

    /** Says each token as often as there are chains, and which one it is the turn of. */
    private static final class Repeat extends TokenFilter {
        private final int times;
        private final PositionIncrementAttribute increment = addAttribute(PositionIncrementAttribute.class);
        private int turn;
        private State token;

        private Repeat(TokenStream input, int times) {
            super(input);
            this.times = times;
        }

        @Override
        public boolean incrementToken() throws IOException {
            if (token == null || ++turn >= times) {
                if (input.incrementToken() == false) {
                    return false;
                }
                turn = 0;
                token = captureState();
            } else {
                restoreState(token);
                increment.setPositionIncrement(0);
            }
            return true;
        }

        @Override
        public void reset() throws IOException {
            super.reset();
            turn = 0;
            token = null;
        }
    }

    /** Applies a chain to the tokens whose turn it is. */
    private static final class Only extends ConditionalTokenFilter {
        private final Repeat repeat;
        private final int chain;

        private Only(TokenStream input, Repeat repeat, int chain, List<TokenFilterFactory> links) {
            super(input, stream -> {
                for (TokenFilterFactory link : links) {
                    stream = link.create(stream);
                }
                return stream;
            });
            this.repeat = repeat;
            this.chain = chain;
        }

        @Override
        protected boolean shouldFilter() {
            return repeat.turn == chain;
        }
    }
}
