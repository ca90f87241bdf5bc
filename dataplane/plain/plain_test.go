package plain_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"aether/dataplane/plain"
)

func written(t *testing.T, s string) string {
	t.Helper()
	var b bytes.Buffer
	if n, err := plain.NewWriter(&b).Write([]byte(s)); n != len(s) || err != nil {
		t.Fatalf("%d of %d, %v", n, len(s), err)
	}
	return b.String()
}

// TestEveryRune: of all runes those that can be printed stay, and of the others nothing
// is left but what JSON's readers take for them.
func TestEveryRune(t *testing.T) {
	var text, want []byte
	changed := 0
	for r := rune(0); r <= unicode.MaxRune; r++ {
		if !utf8.ValidRune(r) {
			continue
		}
		text = utf8.AppendRune(text, r)
		switch high, low := utf16.EncodeRune(r); {
		case strconv.IsPrint(r):
			want = utf8.AppendRune(want, r)
			continue
		case r > 0xffff:
			want = fmt.Appendf(want, `\u%04x\u%04x`, high, low)
		default:
			want = fmt.Appendf(want, `\u%04x`, r)
		}
		changed++
	}
	if changed < 100000 { // most of Unicode is not assigned
		t.Errorf("only %d runes are to be escaped", changed)
	}
	got := plain.Append(nil, text)
	if !bytes.Equal(got, want) {
		i := 0
		for i < min(len(got), len(want)) && got[i] == want[i] {
			i++
		}
		t.Fatalf("at byte %d: %q, want %q", i, got[i:min(len(got), i+20)], want[i:min(len(want), i+20)])
	}
	if plain.String(string(text)) != string(want) {
		t.Error("a string is written otherwise than bytes")
	}
	var back string
	if err := json.Unmarshal(append(plain.AppendJSON([]byte(`"`), string(text)), '"'), &back); err != nil || back != string(text) {
		t.Errorf("all of them in JSON are others: %v", err)
	}
	if got := strings.NewReplacer("\n", `\u000a`, "\t", `\u0009`).Replace(written(t, string(text))); got != string(want) {
		t.Error("a Writer writes more, or less, than line ends and tabs as they are")
	}
}

// TestControls: by name, what a terminal, or an eye, could be misled with.
func TestControls(t *testing.T) {
	for in, want := range map[string]string{
		"\x1b[2J": `\u001b[2J`, "\u009b2J": `\u009b2J`, "\x9b2J": `\ufffd2J`, "\u0085": `\u0085`, "\x7f": `\u007f`, "a\r\nb\tc": `a\u000d\u000ab\u0009c`,
		"\u202egnp.exe": `\u202egnp.exe`, "\u2066x\u2069": `\u2066x\u2069`, "\u200b": `\u200b`, "\ufeff": `\ufeff`, "\u2028": `\u2028`, "\u00a0": `\u00a0`,
		"\U000e0001": `\udb40\udc01`, "caf\u00e9 \U0001f600": "caf\u00e9 \U0001f600", `a\u001b`: `a\u001b`, "": "",
	} {
		if got := plain.String(in); got != want {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
	}
}

// FuzzPlain: whatever bytes come, what is written can be printed, is the same when it
// is done again, and keeps its lines in a Writer.
func FuzzPlain(f *testing.F) {
	for _, s := range []string{"/a\"b\\c", "\r\n{\"msg\":\"forged\"}", "\x1b[2J\x07", "\x9b2J", "\u202e\u2028\ufeff", "\xff\xc3(\xe2\x82", "\U000e0001", "</script>"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := plain.String(s)
		if !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q", got)
		}
		if again := plain.String(got); again != got {
			t.Fatalf("%q, and done again %q", got, again)
		}
		w := written(t, s)
		if strings.Count(w, "\n") != strings.Count(s, "\n") || strings.ContainsFunc(w, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' }) {
			t.Fatalf("a Writer writes %q", w)
		}
		if v, err := json.Marshal(s); err != nil || !json.Valid([]byte(written(t, string(v)))) {
			t.Fatalf("JSON in a Writer is none any more: %q", written(t, string(v)))
		}
	})
}

func TestPlainAllocatesNothing(t *testing.T) {
	b := make([]byte, 0, 256)
	for _, s := range []string{"GET /items", "\u009b\u202e\U000e0001\xff"} {
		if n := testing.AllocsPerRun(100, func() { b = plain.AppendJSON(b[:0], s) }); n != 0 {
			t.Errorf("%q: %v allocations, want 0", s, n)
		}
	}
}
