package halflife.node;

import java.io.IOException;
import org.apache.lucene.analysis.CharArraySet;
import org.apache.lucene.analysis.FilteringTokenFilter;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.tokenattributes.CharTermAttribute;
import org.apache.lucene.analysis.tokenattributes.PositionIncrementAttribute;

/** Lets each word through once: once in the whole stream, or once at a position. */
final class UniqueFilter extends FilteringTokenFilter {
    private final boolean samePosition;
    private final CharArraySet seen = new CharArraySet(8, false);
    private final CharTermAttribute term = addAttribute(CharTermAttribute.class);
    private final PositionIncrementAttribute increment = addAttribute(PositionIncrementAttribute.class);

    UniqueFilter(TokenStream input, boolean samePosition) {
        super(input);
        this.samePosition = samePosition;
    }

    @Override
    protected boolean accept() {
        if (samePosition && increment.getPositionIncrement() > 0) {
            seen.clear();
        }
        if (seen.contains(term.buffer(), 0, term.length())) {
            return false;
        }
        seen.add(term.toString());
        return true;
    }

    @Override
    public void reset() throws IOException {
        super.reset();
        seen.clear();
    }
}
