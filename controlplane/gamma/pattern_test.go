package gamma

import (
	"regexp"
	"strings"
	"testing"
)

// FuzzPattern: what passes, Go's regexp compiles, also anchored as the routes
// use it, and the anchors hold; and it is done in a time that the bound gives.
func FuzzPattern(f *testing.F) {
	for _, s := range []string{"a.*", "a)|(b", "(?i)x", "(", `\pL{1000}`, strings.Repeat("a{1000}", 9), "(?:(?:a{1}){1}){1}", "(?:){1000}", strings.Repeat("(", 500), strings.Repeat("x", maxPattern+1)} {
		f.Add(s, "a")
	}
	f.Fuzz(func(t *testing.T, p, text string) {
		if why := badPattern(p); why != "" {
			if re, err := regexp.Compile(p); err == nil && len(p) <= maxPattern && strings.Contains(why, "regular expression") {
				t.Fatalf("%q: %s, but it compiles to %v", p, why, re)
			}
			return
		}
		re, err := regexp.Compile(`\A(?:` + p + `)\z`)
		if err != nil {
			t.Fatalf("%q passes, and anchored it is %v", p, err)
		}
		if re.MatchString(text) {
			// Without (?m) and the like an anchored match is the whole text.
			if at := re.FindStringIndex(text); at[0] != 0 || at[1] != len(text) {
				t.Fatalf("%q matches %v of %q", p, at, text)
			}
		}
	})
}

// TestBadPattern holds the bounds, on both sides.
func TestBadPattern(t *testing.T) {
	for _, tt := range []struct{ p, want string }{
		{strings.Repeat("x", maxPattern), ""},
		{strings.Repeat("x", maxPattern+1), "is 1025 bytes long, the limit is 1024: shorten it"},
		{"(?:a{1000}){1}b{1000}c{1000}d{1000}", ""},
		{"a{1000}b{1000}c{1000}d{1000}e{1000}", "compiles to more than 4096 instructions"},
		{strings.Repeat(`\pL{1000}`, 100), "compiles to more than 4096 instructions"},
		{"a)|(b", "is no regular expression (error parsing regexp: unexpected )"},
		{`(?=a)`, "is no regular expression"},
		{`(a)\1`, "is no regular expression"},
	} {
		if why := badPattern(tt.p); (tt.want == "") != (why == "") || !strings.HasPrefix(why, tt.want) {
			t.Errorf("%.60q: %q, want %q", tt.p, why, tt.want)
		}
	}
}
