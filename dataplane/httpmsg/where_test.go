package httpmsg

import (
	"regexp"
	"strings"
	"testing"
)

// FuzzAppendName: whatever the name, what is shown is printable, bounded, in quotation marks that end where they end,
// and a short plain name as it is.
func FuzzAppendName(f *testing.F) {
	for _, s := range []string{"", "x-a", "X A", "\x1b[31m", "'\"\\", "\xff\x00", strings.Repeat("a", 64), strings.Repeat("a", 65), strings.Repeat("\n", 100)} {
		f.Add(s)
	}
	shown := regexp.MustCompile(`^'[ !#-&(-\[\]-~]*(\\x[0-9a-f]{2}[ !#-&(-\[\]-~]*)*'$`)
	f.Fuzz(func(t *testing.T, s string) {
		got := string(AppendName([]byte("field "), []byte(s)))
		name, ok := strings.CutPrefix(got, "field ")
		if !ok || !shown.MatchString(name) || len(name) > maxShown+len("'...'") {
			t.Errorf("%q: %s", s, got)
		}
		if plain := regexp.MustCompile(`^[!#-&(-\[\]-~ ]{0,64}$`).MatchString(s); plain && name != "'"+strings.ToLower(s)+"'" {
			t.Errorf("%q: %s", s, got)
		}
	})
}
