package halflife.node;

/** The escapes that mapping rules and character lists may hold: \\ \n \t \r \b \f and a u with four hex digits. */
final class Escapes {
    private Escapes() {}

    static String undo(String text) {
        StringBuilder plain = new StringBuilder(text.length());
        int at = 0;
        while (at < text.length()) {
            char character = text.charAt(at++);
            if (character != '\\') {
                plain.append(character);
                continue;
            }
            if (at == text.length()) {
                throw invalid(text);
            }
            char escaped = text.charAt(at++);
            switch (escaped) {
                case 'n' -> plain.append('\n');
                case 't' -> plain.append('\t');
                case 'r' -> plain.append('\r');
                case 'b' -> plain.append('\b');
                case 'f' -> plain.append('\f');
                case 'u' -> {
                    if (at + 4 > text.length()) {
                        throw invalid(text);
                    }
                    plain.append((char) Integer.parseInt(text, at, at + 4, 16));
                    at += 4;
                }
                default -> plain.append(escaped);
            }
        }
        return plain.toString();
    }

    private static IllegalArgumentException invalid(String text) {
        return new IllegalArgumentException("Invalid escaped char in [" + text + "]");
    }
}
