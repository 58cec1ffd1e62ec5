package dev.dualclaw;

import java.math.BigDecimal;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;
import java.util.StringJoiner;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** The canonical form of an {@code args_json} text. */
final class CanonicalArgs {
  private static final int MAX_DEPTH = 100;
  private static final int MAX_DIGITS = 4_000;
  private static final Pattern NUMBER =
      Pattern.compile("-?(?:0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?");
  private static final Pattern WORD = Pattern.compile("null|true|false|NaN|-?Infinity");

  private final String text;
  private int at;

  private CanonicalArgs(String text) {
    this.text = text;
  }

  /**
   * Returns the JSON text of the one object that a text stands for. Never throws: what is not one JSON object, or is
   * nested deeper than 100, is <code>{}</code>. Canonical text comes out as it went in; numbers never become machine
   * numbers, unless they are floats in another spelling.
   */
  static String of(String args) {
    CanonicalArgs reader = new CanonicalArgs(args);
    try {
      reader.space();
      String value = reader.value(0);
      reader.space();
      return reader.at == args.length() && value.startsWith("{") ? value : "{}";
    } catch (Unreadable unreadable) {
      return "{}";
    }
  }

  /**
   * Returns a text as a JSON string; only quote, backslash and U+0000 to U+001F are escaped, and lone surrogates are
   * U+FFFD.
   */
  static String quote(String given) {
    String text = wellFormed(given);
    StringBuilder out = new StringBuilder(text.length() + 2).append('"');
    for (int i = 0; i < text.length(); i++) {
      char c = text.charAt(i);
      switch (c) {
        case '"', '\\' -> out.append('\\').append(c);
        case '\b' -> out.append("\\b");
        case '\f' -> out.append("\\f");
        case '\n' -> out.append("\\n");
        case '\r' -> out.append("\\r");
        case '\t' -> out.append("\\t");
        default -> {
          if (c < 0x20) {
            out.append("\\u00").append(Character.forDigit(c >> 4, 16)).append(Character.forDigit(c & 0xf, 16));
          } else {
            out.append(c);
          }
        }
      }
    }
    return out.append('"').toString();
  }

  private static final class Unreadable extends Exception {
    private static final long serialVersionUID = 1;

    Unreadable() {
      super(null, null, false, false);
    }
  }

  private char peek() throws Unreadable {
    if (at >= text.length()) {
      throw new Unreadable();
    }
    return text.charAt(at);
  }

  private boolean accept(char wanted) {
    if (at < text.length() && text.charAt(at) == wanted) {
      at++;
      return true;
    }
    return false;
  }

  private void expect(char wanted) throws Unreadable {
    if (!accept(wanted)) {
      throw new Unreadable();
    }
  }

  private void space() {
    while (at < text.length() && " \t\n\r".indexOf(text.charAt(at)) >= 0) {
      at++;
    }
  }

  private String value(int depth) throws Unreadable {
    switch (peek()) {
      case '{':
        return object(depth + 1);
      case '[':
        return list(depth + 1);
      case '"':
        return quote(string());
      default:
        Matcher word = WORD.matcher(text).region(at, text.length());
        if (word.lookingAt()) {
          at = word.end();
          return word.group().endsWith("y") || word.group().equals("NaN") ? "null" : word.group();
        }
        return number();
    }
  }

  private String object(int depth) throws Unreadable {
    if (depth > MAX_DEPTH) {
      throw new Unreadable();
    }
    Map<String, String> members = new LinkedHashMap<>(); // of duplicate keys the last wins, at the place of the first
    expect('{');
    space();
    if (accept('}')) {
      return "{}";
    }
    do {
      space();
      if (peek() != '"') {
        throw new Unreadable();
      }
      String key = string();
      space();
      expect(':');
      space();
      members.put(key, value(depth));
      space();
    } while (accept(','));
    expect('}');
    StringJoiner out = new StringJoiner(", ", "{", "}");
    members.forEach((key, value) -> out.add(quote(key) + ": " + value));
    return out.toString();
  }

  private String list(int depth) throws Unreadable {
    if (depth > MAX_DEPTH) {
      throw new Unreadable();
    }
    StringJoiner out = new StringJoiner(", ", "[", "]");
    expect('[');
    space();
    if (accept(']')) {
      return "[]";
    }
    do {
      space();
      out.add(value(depth));
      space();
    } while (accept(','));
    expect(']');
    return out.toString();
  }

  private String string() throws Unreadable {
    StringBuilder out = new StringBuilder();
    expect('"');
    for (char c = peek(); c != '"'; c = peek()) {
      if (c < 0x20) {
        throw new Unreadable();
      }
      at++;
      out.append(c == '\\' ? escape() : c);
    }
    at++;
    return wellFormed(out.toString());
  }

  private char escape() throws Unreadable {
    char letter = peek();
    at++;
    if (letter == 'u') {
      if (at + 4 > text.length()) {
        throw new Unreadable();
      }
      int unit = 0;
      for (int i = 0; i < 4; i++, at++) {
        char digit = text.charAt(at);
        int value = digit < 0x80 ? Character.digit(digit, 16) : -1;
        if (value < 0) {
          throw new Unreadable();
        }
        unit = unit * 16 + value;
      }
      return (char) unit;
    }
    int place = "\"\\/bfnrt".indexOf(letter);
    if (place < 0) {
      throw new Unreadable();
    }
    return "\"\\/\b\f\n\r\t".charAt(place);
  }

  /** Returns a text with U+FFFD for its lone surrogates. */
  static String wellFormed(String text) {
    StringBuilder mended = null;
    for (int i = 0; i < text.length(); i++) {
      char c = text.charAt(i);
      if (Character.isHighSurrogate(c) && i + 1 < text.length() && Character.isLowSurrogate(text.charAt(i + 1))) {
        i++;
      } else if (Character.isSurrogate(c)) {
        mended = mended == null ? new StringBuilder(text) : mended;
        mended.setCharAt(i, '\uFFFD');
      }
    }
    return mended == null ? text : mended.toString();
  }

  private String number() throws Unreadable {
    Matcher found = NUMBER.matcher(text).region(at, text.length());
    if (!found.lookingAt()) {
      throw new Unreadable();
    }
    at = found.end();
    String literal = found.group();
    if (literal.chars().filter(c -> c >= '0' && c <= '9').count() > MAX_DIGITS) {
      return "null";
    }
    if (found.group(1) == null && found.group(2) == null) {
      return literal.equals("-0") ? "0" : literal;
    }
    return floatText(Double.parseDouble(literal));
  }

  /** Prints a float as Python does: the shortest digits that read back as the same number. */
  private static String floatText(double number) {
    if (Double.isInfinite(number)) {
      return "null";
    }
    if (number == 0) {
      return 1 / number < 0 ? "-0.0" : "0.0";
    }
    String sign = number < 0 ? "-" : "";
    ShortestDigits shortest = ShortestDigits.of(Math.abs(number));
    String digits = shortest.digits();
    int exponent = shortest.exponent();
    if (exponent < -4 || exponent >= 16) {
      String mantissa = digits.length() == 1 ? digits : digits.charAt(0) + "." + digits.substring(1);
      String power = (Math.abs(exponent) < 10 ? "0" : "") + Math.abs(exponent);
      return sign + mantissa + "e" + (exponent < 0 ? "-" : "+") + power;
    }
    if (exponent < 0) {
      return sign + "0." + "0".repeat(-exponent - 1) + digits;
    }
    if (digits.length() <= exponent + 1) {
      return sign + digits + "0".repeat(exponent + 1 - digits.length()) + ".0";
    }
    return sign + digits.substring(0, exponent + 1) + "." + digits.substring(exponent + 1);
  }

  /**
   * The fewest significant digits that read back as a number, and the power of ten of the first.
   *
   * <p>Looked for one by one: {@code Double.toString} prints too many for some numbers before Java 19.
   */
  private record ShortestDigits(String digits, int exponent) {
    static ShortestDigits of(double number) {
      for (int count = 1; ; count++) {
        String printed = String.format(Locale.ROOT, "%." + (count - 1) + "e", new BigDecimal(number));
        if (count == 17 || Double.parseDouble(printed) == number) {
          int mark = printed.indexOf('e');
          String digits = printed.substring(0, mark).replace(".", "").replaceAll("0+$", "");
          return new ShortestDigits(digits.isEmpty() ? "0" : digits, Integer.parseInt(printed.substring(mark + 1)));
        }
      }
    }
  }
}
