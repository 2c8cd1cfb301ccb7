"""English words that hold a sentence together, each written once; who leaves out which says so by putting lists together.

Pure: what a word says of a subject differs with its use. In a query's words "may" can be the month, for a document's name
"who" is nobody, and a speller must leave alone whatever is spelled well, telling or not.
"""

from typing import Final


def words(text: str) -> frozenset[str]:
    """Return the words of a text written with spaces."""
    return frozenset(text.split())


FUNCTION_WORDS: Final = words(
    "a an the and or but nor of at by for from in into on onto to with about as than is are was were be been am "
    "do does did has have had can could must shall should would i I you he she we they me him her them my your his "
    "its our their this that these those there here what which who whom whose when where why how if then not no"
)
"""English words that say nothing of a subject, as they are written inside a sentence: "IT" and "The Who" are none. Left out
are those that are also something else in small letters, `AMBIGUOUS`."""
AMBIGUOUS: Final = words("it us may might will")
"""Function words that are something else too."""
FURTHER: Final = words(
    "above after again against also although always among another any anybody anyone anything because before being below"
    " beside between both cannot couldn't doesn't doing don't down during each either ever every everyone everything"
    " further hadn't haven't having hers herself himself isn't itself just many mine more most much myself neither never"
    " none nothing once only other ours ourselves over same shouldn't since some somebody someone something still such"
    " theirs themselves though through thus toward towards under unless until upon very want wants wasn't weren't whatever"
    " whenever whether while within without won't wouldn't yours yourself yourselves"
)
"""Words that hold a question together too, but bound what it asks for: "before" and "after", "none" and "every"."""

TIME_NAMES: Final = words("created_at created date published published_at timestamp time")
"""What others call the time that a document was made."""
