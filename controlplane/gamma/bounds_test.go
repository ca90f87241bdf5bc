package gamma

import (
	"fmt"
	"strings"
	"testing"
)

// TestReasonsAreBounded: an object with everything wrong says eight things, and that there is more, however much more.
func TestReasonsAreBounded(t *testing.T) {
	have, n := "", 0
	var want []string
	for i := range 1000 {
		if have = addReason(have, fmt.Sprint("reason ", i), &n); i < 8 {
			want = append(want, fmt.Sprint("reason ", i))
		}
	}
	if want := strings.Join(want, "; ") + "; and more"; have != want {
		t.Errorf("got  %s\nwant %s", have, want)
	}
}
