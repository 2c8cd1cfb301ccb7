package halflife.node;

import java.lang.reflect.Field;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.function.IntPredicate;
import java.util.stream.Collectors;

/** Classes of characters by the names that {@code token_chars} uses. */
final class CharacterClasses {
    private static final Set<Integer> PUNCTUATION = Set.of(
        (int) Character.START_PUNCTUATION, (int) Character.END_PUNCTUATION, (int) Character.OTHER_PUNCTUATION,
        (int) Character.CONNECTOR_PUNCTUATION, (int) Character.DASH_PUNCTUATION, (int) Character.INITIAL_QUOTE_PUNCTUATION,
        (int) Character.FINAL_QUOTE_PUNCTUATION);
    private static final Set<Integer> SYMBOLS = Set.of(
        (int) Character.CURRENCY_SYMBOL, (int) Character.MATH_SYMBOL, (int) Character.OTHER_SYMBOL, (int) Character.MODIFIER_SYMBOL);

    static final Map<String, IntPredicate> BASIC = Map.of(
        "letter", Character::isLetter,
        "digit", Character::isDigit,
        "whitespace", Character::isWhitespace,
        "punctuation", character -> PUNCTUATION.contains(Character.getType(character)),
        "symbol", character -> SYMBOLS.contains(Character.getType(character)));

    private static final Map<String, IntPredicate> ALL = withUnicodeCategories();

    private CharacterClasses() {}

    /** The characters that a gram may hold: every one unless {@code token_chars} says otherwise. */
    static IntPredicate read(Options options) {
        List<String> names = options.list("token_chars");
        if (names.isEmpty()) {
            return character -> true;
        }
        IntPredicate kept = character -> false;
        for (String given : names) {
            String name = given.strip().toLowerCase(Locale.ROOT);
            if (name.equals("custom")) {
                Set<Integer> custom = options.required("custom_token_chars").codePoints().boxed().collect(Collectors.toSet());
                kept = kept.or(custom::contains);
            } else if (ALL.containsKey(name)) {
                kept = kept.or(ALL.get(name));
            } else {
                throw new IllegalArgumentException("Unknown token type: '" + name + "', must be one of " + ALL.keySet());
            }
        }
        return kept;
    }

    /** Java names each general category of Unicode by a constant; only the directions are bytes too. */
    private static Map<String, IntPredicate> withUnicodeCategories() {
        Map<String, IntPredicate> classes = new HashMap<>(BASIC);
        for (Field constant : Character.class.getFields()) {
            if (constant.getType() == byte.class && constant.getName().startsWith("DIRECTIONALITY") == false) {
                try {
                    int category = constant.getByte(null);
                    classes.putIfAbsent(
                        constant.getName().toLowerCase(Locale.ROOT), character -> Character.getType(character) == category);
                } catch (IllegalAccessException failure) {
                    throw new IllegalStateException(failure);
                }
            }
        }
        return classes;
    }
}
