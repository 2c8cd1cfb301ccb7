package halflife.node;

import java.util.function.Function;
import java.util.function.UnaryOperator;
import org.apache.lucene.analysis.TokenStream;
import org.elasticsearch.index.analysis.AbstractTokenFilterFactory;
import org.elasticsearch.index.analysis.NormalizingTokenFilterFactory;
import org.elasticsearch.index.analysis.TokenFilterFactory;
import org.elasticsearch.indices.analysis.AnalysisModule.AnalysisProvider;

/**
 * A token filter factory made of a function from stream to stream, and of what Elasticsearch wants to know of it
 * besides: whether it acts on single characters (and so on keyword normalizers and wildcard terms too), and what takes
 * its place when the rules of a later synonym filter are read.
 */
class Filter extends AbstractTokenFilterFactory {
    private final UnaryOperator<TokenStream> make;

    private Filter(String name, UnaryOperator<TokenStream> make) {
        super(name);
        this.make = make;
    }

    @Override
    public TokenStream create(TokenStream input) {
        return make.apply(input);
    }

    /** Works on words: plays no part in normalizers. */
    static TokenFilterFactory onWords(String name, UnaryOperator<TokenStream> make) {
        return new Filter(name, make);
    }

    /** Works on characters: a normalizer may use it. */
    static TokenFilterFactory onCharacters(String name, UnaryOperator<TokenStream> make) {
        return new OnCharacters(name, make);
    }

    /** Like {@link #onWords}, but the rules of a later synonym filter are read through another one. */
    static TokenFilterFactory withSynonymFilter(String name, UnaryOperator<TokenStream> make, TokenFilterFactory stand) {
        return new Filter(name, make) {
            @Override
            public TokenFilterFactory getSynonymFilter() {
                return stand;
            }
        };
    }

    /** Puts several tokens where one was: no synonym rule can be read through it. */
    static TokenFilterFactory notBeforeSynonyms(String name, UnaryOperator<TokenStream> make) {
        return new Filter(name, make) {
            @Override
            public TokenFilterFactory getSynonymFilter() {
                throw refusal(name);
            }
        };
    }

    /** Cuts grams: as {@link #notBeforeSynonyms}, and offsets no longer suit the fast vector highlighter. */
    static TokenFilterFactory grams(String name, UnaryOperator<TokenStream> make) {
        return new Filter(name, make) {
            @Override
            public TokenFilterFactory getSynonymFilter() {
                throw refusal(name);
            }

            @Override
            public boolean breaksFastVectorHighlighter() {
                return true;
            }
        };
    }

    static IllegalArgumentException refusal(String name) {
        return new IllegalArgumentException("Token filter [" + name + "] cannot be used to parse synonyms");
    }

    /** {@link #onWords} of a filter that has no settings. */
    static AnalysisProvider<TokenFilterFactory> plain(UnaryOperator<TokenStream> make) {
        return (index, environment, name, settings) -> onWords(name, make);
    }

    /** {@link #onCharacters} of a filter that has no settings. */
    static AnalysisProvider<TokenFilterFactory> characters(UnaryOperator<TokenStream> make) {
        return (index, environment, name, settings) -> onCharacters(name, make);
    }

    /** A filter whose settings are all it needs to know. */
    static AnalysisProvider<TokenFilterFactory> words(Function<Options, UnaryOperator<TokenStream>> read) {
        return (index, environment, name, settings) -> onWords(name, read.apply(new Options(index, environment, name, settings)));
    }

    private static final class OnCharacters extends Filter implements NormalizingTokenFilterFactory {
        private OnCharacters(String name, UnaryOperator<TokenStream> make) {
            super(name, make);
        }
    }
}
