package plain_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode"
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
	var all strings.Builder
	changed := 0
	for r := rune(0); r <= unicode.MaxRune; r++ {
		if !utf8.ValidRune(r) {
			continue
		}
		s := string(r)
		all.WriteString(s)
		got := plain.String(s)
		if unicode.IsPrint(r) != (got == s) {
			t.Fatalf("%U: %q", r, got)
		}
		if got == s {
			continue
		}
		changed++
		for _, c := range got {
			if c != '\\' && !('0' <= c && c <= '9') && !('a' <= c && c <= 'f') && c != 'u' {
				t.Fatalf("%U: %q", r, got)
			}
		}
	}
	if changed < 100000 { // most of Unicode is not assigned
		t.Errorf("only %d runes are escaped", changed)
	}
	text := all.String()
	var back string
	if err := json.Unmarshal([]byte(`"`+string(plain.AppendJSON(nil, text))+`"`), &back); err != nil || back != text {
		t.Errorf("all of them in JSON are others: %v", err)
	}
	once := plain.String(text)
	if string(plain.Append(nil, []byte(text))) != once {
		t.Error("bytes are written otherwise than a string")
	}
	if got := strings.NewReplacer("\n", `\u000a`, "\t", `\u0009`).Replace(written(t, text)); got != once {
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
