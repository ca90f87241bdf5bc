package file

import (
	"strings"
	"testing"
)

// TestConditionsAreBounded: a match has as many headers or parameters as may be, and one more is refused by number;
// so is one more name in a list of a CORS filter.
func TestConditionsAreBounded(t *testing.T) {
	const head = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec:\n  parentRefs: [{kind: Service, group: \"\", name: cart}]\n  rules:\n"
	list := func(n int, one string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(strings.ReplaceAll(one, "#", string(rune('a'+i/26))+string(rune('a'+i%26))))
		}
		return b.String()
	}
	for name, tt := range map[string]struct {
		rules, one string
		most       int
	}{
		"headers":     {"  - matches:\n    - headers:\n", "      - {name: x-#, value: v}\n", 64},
		"queryParams": {"  - matches:\n    - queryParams:\n", "      - {name: q#, value: v}\n", 64},
		"CORS":        {"  - filters:\n    - type: CORS\n      cors:\n        allowMethods: [GET]\n        allowOrigins:\n", "        - \"https://#.example\"\n", 64},
	} {
		for n, fine := range map[int]bool{tt.most: true, tt.most + 1: false} {
			p := parse("x.yaml", []byte(head+tt.rules+list(n, tt.one)), Options{}.withDefaults())
			l := newLoader("", Options{})
			l.files["x.yaml"] = p
			_, problems := l.build()
			said := false
			for _, pr := range problems {
				said = said || strings.Contains(pr.Reason, "the limit is 64:")
			}
			if said == fine {
				t.Errorf("%d %s: %v", n, name, problems)
			}
		}
	}
}
