package file

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/controlplane/input"
	"aether/dataplane/model"
	"aether/e2e/testseed"
)

// ruleFlaws are single flaws of a rule, each with what its problem has to name, and where in the rule it is.
var ruleFlaws = []struct{ rule, reason, place string }{
	{`matches: [{path: {type: Exact, value: a}}]`, "path", `matches[0]: path`},
	{`matches: [{path: {type: Nope, value: /a}}]`, "Nope", `matches[0]: path`},
	{`matches: [{path: {type: RegularExpression, value: "("}}]`, "path", `matches[0]: path`},
	{`matches: [{headers: [{name: "x(y", value: v}]}]`, "x(y", `matches[0].headers[0]: header`},
	{`matches: [{headers: [{name: x, type: RegularExpression, value: "["}]}]`, "header x", `matches[0].headers[0]: header`},
	{`matches: [{method: "G T"}]`, "method", `matches[0]: method`},
	{`matches: [{queryParams: [{name: q, type: Nope, value: v}]}]`, "Nope", `matches[0].queryParams[0]: parameter`},
	{`matches: 7`, "matches", `.matches" is`},
	{`match: []`, "match", `.match`},
	{`filters: [{type: Nope}]`, "filters", `filters[0]: filter`},
	{`filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}], matches: [{path: {type: Exact, value: /a}}]`, "ReplacePrefixMatch", `filters[0]: ReplacePrefixMatch`},
	{`filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: host, value: x}]}}]`, "host", `filters[0]: header`},
	{`timeouts: {request: 7}`, "timeouts.request", `.timeouts.request`},
	{`timeouts: {request: 1s, backendRequest: 2s}`, "backendRequest", `timeouts: backendRequest`},
	{`retry: {codes: [200]}`, "retry.codes", `retry.codes[0]`},
	{`retry: {attempts: -1}`, "retry.attempts", `retry.attempts`},
	{`sessionPersistence: {type: Nope}`, "sessionPersistence.type", `sessionPersistence.type`},
	{`backendRefs: [{name: cart, port: 8080, weight: -1}]`, "weight", `.backendRefs[0]: weight`},
	{`backendRefs: [{name: cart}]`, "port", `.backendRefs[0]: no port`},
	{`backendRefs: [{name: cart, port: 8080, kind: Nope}]`, "InvalidKind", `.backendRefs[0]: InvalidKind`},
	{`backendRefs: [{name: cart, port: 8080, namespace: other}]`, "RefNotPermitted", `.backendRefs[0]: RefNotPermitted`},
	{`backendRefs: [{name: nowhere, port: 8080}]`, "BackendNotFound", `.backendRefs[0]: backendRef shop/nowhere`},
	{`backendRefs: [{name: cart, port: 8080, filters: [{type: Nope}]}]`, "filters", `.backendRefs[0]: filters[0]`},
	{`filters: [{type: RequestMirror, requestMirror: {backendRef: {name: cart}}}]`, "filters[0]", `.filters[0]: no port`},
}

const cartPod = `apiVersion: v1
kind: Pod
metadata: {name: cart-1, namespace: shop, labels: {aether.io/managed: "true"}, annotations: {endpoint.aether.io/ports: "8080"}}
spec: {nodeName: n1, serviceAccountName: cart, containers: [{name: cart}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.11}], conditions: [{type: Ready, status: "True"}]}
`

// TestOneProblemARule: of random routes every invalid rule, and every rule with an invalid backend or
// copy, has exactly one problem that names route, rule, reason and place, however many look at it on
// its way from the file into the snapshot.
func TestOneProblemARule(t *testing.T) {
	seed := testseed.Seed(t)
	for i := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, i))
		var rules strings.Builder
		want, places := map[int]string{}, map[int]string{}
		for n := range 1 + r.IntN(6) {
			rule := "backendRefs: [{name: cart, port: 8080}]"
			if f := ruleFlaws[r.IntN(len(ruleFlaws))]; r.IntN(2) == 0 {
				rule, want[n], places[n] = f.rule, f.reason, f.place
			}
			fmt.Fprintf(&rules, "  - {%s}\n", rule)
		}
		text := cartPod + "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: bad, namespace: shop}\nspec:\n" +
			"  parentRefs: [{group: \"\", kind: Service, name: cart}]\n  rules:\n"
		first := 1 + strings.Count(text, "\n") // the line of the first rule
		text += rules.String()
		m, reported := loadText(t, text)
		_, compiled := compile.Compile(m)
		got := input.Problems(reported, compiled)
		for n, reason := range want {
			about := func(p model.Problem) bool {
				return p.Object == "HTTPRoute shop/bad" && strings.Contains(p.Reason, fmt.Sprintf("rules[%d]", n))
			}
			k := slices.IndexFunc(got, about)
			if k < 0 || slices.ContainsFunc(got[k+1:], about) || !strings.Contains(got[k].Reason, reason) {
				t.Errorf("rule %d (%s): not exactly one problem in %v", n, reason, got)
				continue
			}
			// The place is the field, with its indexes, and the line; what only compiling sees has no line.
			line := "x.yaml:" + strconv.Itoa(first+n)
			if strings.Contains(reason, "NotFound") {
				line = ""
			}
			if !strings.Contains(got[k].Reason, places[n]) || got[k].Where != line {
				t.Errorf("rule %d: %+v, want it at %q, %s", n, got[k], line, places[n])
			}
		}
		if len(got) != len(want) {
			t.Errorf("%d problems of %d flaws", len(got), len(want))
		}
		// Without what the source reports, as before its first words since a start, compiling names all but
		// what the source alone knows to be wrong.
		if _, alone := compile.Compile(m); len(alone) != len(want) {
			t.Errorf("%d problems of %d flaws where the source reports none: %v", len(alone), len(want), alone)
		}
		if t.Failed() {
			t.Fatalf("%s\nmesh %d of seed %d: %v", text, i, seed, got)
		}
	}
}
