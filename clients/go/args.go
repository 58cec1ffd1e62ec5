package dualclaw

import (
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds of the contract: what lies beyond them reads as null (numbers) or as an empty object (nesting).
const (
	maxDepth  = 100
	maxDigits = 4_000
)

// CanonicalArgs returns the JSON text of the one object that an args_json text stands for, in the canonical form of
// the contract. It never fails: what is not one JSON object, or is nested deeper than 100, is "{}".
//
// Canonical text comes out byte for byte as it went in. Numbers are never turned into machine numbers and back unless
// they are floats in another spelling, so 64-bit ids and larger integers keep every digit.
func CanonicalArgs(args string) string {
	reader := argsReader{text: args}
	reader.space()
	object, ok := reader.value(0)
	reader.space()
	if !ok || reader.at != len(args) || !strings.HasPrefix(object, "{") {
		return "{}"
	}
	return object
}

// argsReader reads JSON as Python's json module does, NaN and Infinity included, and writes what it reads as it goes.
type argsReader struct {
	text string
	at   int
}

func (r *argsReader) space() {
	for r.at < len(r.text) && strings.IndexByte(" \t\n\r", r.text[r.at]) >= 0 {
		r.at++
	}
}

func (r *argsReader) accept(literal string) bool {
	if strings.HasPrefix(r.text[r.at:], literal) {
		r.at += len(literal)
		return true
	}
	return false
}

func (r *argsReader) value(depth int) (string, bool) {
	if r.at >= len(r.text) || depth > maxDepth {
		return "", false
	}
	switch r.text[r.at] {
	case '{':
		return r.object(depth + 1)
	case '[':
		return r.list(depth + 1)
	case '"':
		text, ok := r.string()
		return quote(text), ok
	}
	for _, literal := range []string{"null", "true", "false"} {
		if r.accept(literal) {
			return literal, true
		}
	}
	for _, literal := range []string{"NaN", "Infinity", "-Infinity"} {
		if r.accept(literal) {
			return "null", true
		}
	}
	return r.number()
}

func (r *argsReader) object(depth int) (string, bool) {
	if depth > maxDepth {
		return "", false
	}
	var keys []string
	values := map[string]string{}
	r.at++
	for {
		r.space()
		if len(keys) == 0 && r.accept("}") {
			break
		}
		if r.at >= len(r.text) || r.text[r.at] != '"' {
			return "", false
		}
		key, ok := r.string()
		r.space()
		if !ok || !r.accept(":") {
			return "", false
		}
		r.space()
		value, ok := r.value(depth)
		if !ok {
			return "", false
		}
		if _, known := values[key]; !known {
			keys = append(keys, key)
		}
		values[key] = value // of duplicate keys the last wins, at the place of the first
		r.space()
		if r.accept("}") {
			break
		}
		if !r.accept(",") {
			return "", false
		}
	}
	var out strings.Builder
	out.WriteByte('{')
	for number, key := range keys {
		if number > 0 {
			out.WriteString(", ")
		}
		out.WriteString(quote(key))
		out.WriteString(": ")
		out.WriteString(values[key])
	}
	out.WriteByte('}')
	return out.String(), true
}

func (r *argsReader) list(depth int) (string, bool) {
	if depth > maxDepth {
		return "", false
	}
	var out strings.Builder
	out.WriteByte('[')
	r.at++
	for first := true; ; first = false {
		r.space()
		if first && r.accept("]") {
			break
		}
		value, ok := r.value(depth)
		if !ok {
			return "", false
		}
		if !first {
			out.WriteString(", ")
		}
		out.WriteString(value)
		r.space()
		if r.accept("]") {
			break
		}
		if !r.accept(",") {
			return "", false
		}
	}
	out.WriteByte(']')
	return out.String(), true
}

// string reads a string literal and returns its text; lone surrogates are U+FFFD.
func (r *argsReader) string() (string, bool) {
	var out strings.Builder
	r.at++
	for r.at < len(r.text) {
		c := r.text[r.at]
		switch {
		case c == '"':
			r.at++
			return out.String(), true
		case c < 0x20:
			return "", false
		case c != '\\':
			_, size := utf8.DecodeRuneInString(r.text[r.at:])
			out.WriteString(r.text[r.at : r.at+size])
			r.at += size
		default:
			escaped, ok := r.escape()
			if !ok {
				return "", false
			}
			out.WriteRune(escaped)
		}
	}
	return "", false
}

func (r *argsReader) escape() (rune, bool) {
	if r.at+1 >= len(r.text) {
		return 0, false
	}
	letter := r.text[r.at+1]
	r.at += 2
	if letter == 'u' {
		return r.unicode()
	}
	place := strings.IndexByte(`"\/bfnrt`, letter)
	if place < 0 {
		return 0, false
	}
	return rune("\"\\/\b\f\n\r\t"[place]), true
}

func (r *argsReader) unicode() (rune, bool) {
	high, ok := r.hex()
	if !ok {
		return 0, false
	}
	if high < 0xD800 || high > 0xDFFF {
		return high, true
	}
	if high <= 0xDBFF && strings.HasPrefix(r.text[r.at:], `\u`) {
		before := r.at
		r.at += 2
		low, ok := r.hex()
		if !ok {
			return 0, false
		}
		if low >= 0xDC00 && low <= 0xDFFF {
			return 0x10000 + (high-0xD800)<<10 + (low - 0xDC00), true
		}
		r.at = before
	}
	return utf8.RuneError, true
}

func (r *argsReader) hex() (rune, bool) {
	if r.at+4 > len(r.text) {
		return 0, false
	}
	value, err := strconv.ParseUint(r.text[r.at:r.at+4], 16, 16)
	r.at += 4
	return rune(value), err == nil
}

func (r *argsReader) digits() int {
	start := r.at
	for r.at < len(r.text) && r.text[r.at] >= '0' && r.text[r.at] <= '9' {
		r.at++
	}
	return r.at - start
}

func (r *argsReader) number() (string, bool) {
	start := r.at
	r.accept("-")
	first := r.at
	count := r.digits()
	if count == 0 {
		return "", false
	}
	if r.text[first] == '0' { // a number ends after a leading zero
		count, r.at = 1, first+1
	}
	float := false
	if mark := r.at; r.accept(".") {
		if fraction := r.digits(); fraction > 0 {
			count, float = count+fraction, true
		} else {
			r.at = mark
		}
	}
	if mark := r.at; r.accept("e") || r.accept("E") {
		if !r.accept("+") {
			r.accept("-")
		}
		if exponent := r.digits(); exponent > 0 {
			count, float = count+exponent, true
		} else {
			r.at = mark
		}
	}
	literal := r.text[start:r.at]
	switch {
	case count > maxDigits:
		return "null", true
	case float:
		return floatText(literal), true
	case literal == "-0":
		return "0", true
	}
	return literal, true
}

// floatText prints a float as Python does: the shortest digits that read back as the same number.
func floatText(literal string) string {
	number, _ := strconv.ParseFloat(literal, 64)
	if math.IsInf(number, 0) {
		return "null"
	}
	shortest := strconv.FormatFloat(number, 'e', -1, 64)
	mantissa, exponentText, _ := strings.Cut(shortest, "e")
	exponent, _ := strconv.Atoi(exponentText)
	if exponent < -4 || exponent >= 16 {
		return mantissa + "e" + exponentText // Go, too, writes a sign and two digits at least
	}
	plain := strconv.FormatFloat(number, 'f', -1, 64)
	if !strings.Contains(plain, ".") {
		plain += ".0"
	}
	return plain
}

const hexDigits = "0123456789abcdef"

// quote returns a text as a JSON string: only quote, backslash and U+0000 to U+001F are escaped.
func quote(text string) string {
	return string(appendQuoted(make([]byte, 0, len(text)+2), text))
}

// Bytes that are no UTF-8 become U+FFFD.
func appendQuoted(out []byte, text string) []byte {
	if !utf8.ValidString(text) {
		text = strings.ToValidUTF8(text, "\uFFFD")
	}
	out = append(out, '"')
	start := 0
	for at := 0; at < len(text); at++ {
		c := text[at]
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		out = append(out, text[start:at]...)
		start = at + 1
		switch c {
		case '"', '\\':
			out = append(out, '\\', c)
		case '\b':
			out = append(out, `\b`...)
		case '\f':
			out = append(out, `\f`...)
		case '\n':
			out = append(out, `\n`...)
		case '\r':
			out = append(out, `\r`...)
		case '\t':
			out = append(out, `\t`...)
		default:
			out = append(out, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	return append(append(out, text[start:]...), '"')
}
