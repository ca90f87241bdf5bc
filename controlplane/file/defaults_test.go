package file

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// plainRoutes leave out whatever the Gateway API has a default for.
var plainRoutes = map[string]string{
	"HTTPRoute": `
- matches:
  - {path: {value: /a}, headers: [{name: x, value: "1"}], queryParams: [{name: q, value: "1"}]}
  - {path: {type: Exact}}
  - {path: {}}
  - {}
  filters:
  - {type: RequestMirror, requestMirror: {backendRef: {name: cart, port: 80}, fraction: {numerator: 1}}}
  - {type: CORS, cors: {allowOrigins: ["*"]}}
  sessionPersistence: {sessionName: s, cookieConfig: {}}
  retry: {}
  timeouts: {}
  backendRefs:
  - name: cart
    port: 80
    filters: [{type: RequestMirror, requestMirror: {backendRef: {name: cart, port: 80}, fraction: {numerator: 1}}}]
  - name: cart
    port: 80
    filters: [{type: RequestRedirect, requestRedirect: {}}]
- filters: [{type: RequestRedirect, requestRedirect: {}}]
- {}
`,
	"GRPCRoute": `
- matches: [{method: {service: a}, headers: [{name: x, value: "1"}]}, {}]
  filters: [{type: RequestMirror, requestMirror: {backendRef: {name: cart, port: 80}, fraction: {numerator: 1}}}]
  sessionPersistence: {sessionName: s, cookieConfig: {}}
  backendRefs:
  - {name: cart, port: 80, filters: [{type: RequestMirror, requestMirror: {backendRef: {name: cart, port: 80}, fraction: {numerator: 1}}}]}
- {}
`,
	"TCPRoute": "\n- backendRefs: [{name: cart, port: 80}]\n",
	"TLSRoute": "\n- backendRefs: [{name: cart, port: 80}]\n",
}

// TestDefaultsOfTheAPI: a route in a file means what it means where an API server has written
// the defaults of its schema into it. The oracle is the schema that the Gateway API ships;
// each of its defaults is left out of a route somewhere, but for those named here.
func TestDefaultsOfTheAPI(t *testing.T) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	if err != nil {
		t.Fatal(err)
	}
	never := func(path string) bool {
		return path == "spec.parentRefs[].kind" || // Gateway; these are attached to a Service
			path == "spec.rules" || // there are rules; the whole default is asked for below
			strings.Contains(path, ".externalAuth.") || strings.Contains(path, ".backendRefs[].filters[].cors.") // no filters of ours
	}
	for kind, rules := range plainRoutes {
		b, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "config/crd/experimental/gateway.networking.k8s.io_"+strings.ToLower(kind)+"s.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var crd struct {
			Spec struct {
				Versions []struct {
					Name   string `json:"name"`
					Schema struct {
						OpenAPIV3Schema map[string]any `json:"openAPIV3Schema"`
					} `json:"schema"`
				} `json:"versions"`
			} `json:"spec"`
		}
		asClient(t, b, &crd)
		schema := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
		var all []string
		defaultsOf(schema, "", &all)
		used := map[string]bool{}
		bodies := []string{"\n  rules:" + strings.ReplaceAll(rules, "\n", "\n  ")}
		if kind == "HTTPRoute" {
			bodies = append(bodies, "")
		}
		for _, body := range bodies {
			spec := "spec:\n  parentRefs: [{kind: Service, group: \"\", name: cart}, {kind: Service, name: other}]"
			if kind == "TLSRoute" {
				spec += "\n  hostnames: [a.example]"
			}
			text := fmt.Sprintf("apiVersion: gateway.networking.k8s.io/%s\nkind: %s\nmetadata: {name: r, namespace: shop}\n%s%s\n", crd.Spec.Versions[0].Name, kind, spec, body)
			var u map[string]any
			asClient(t, []byte(text), &u)
			withDefaults(schema, u, "", used)
			s := gamma.NewState("", input.Settings{})
			s.Set(kind, u)
			var want []model.Route
			for _, list := range s.Whole().Routes {
				want = append(want, list...)
			}
			got := readRoute(t, []byte(text))
			if len(want) != 1 || got == nil {
				t.Fatalf("%s: %v from the API, %v from a file\n%v", kind, want, got, s.Whole().Problems)
			}
			anyPath(got)
			anyPath(&want[0])
			if !reflect.DeepEqual(*got, want[0]) {
				t.Errorf("%s: a file gives\n%s\nthe API server\n%s", kind, render(&model.Mesh{Routes: []model.Route{*got}}), render(&model.Mesh{Routes: want}))
			}
			if slices.ContainsFunc(got.Rules, func(r model.Rule) bool { return r.Invalid != "" }) {
				t.Errorf("%s: %s", kind, render(&model.Mesh{Routes: []model.Route{*got}}))
			}
		}
		for _, path := range all {
			if strings.HasPrefix(path, "spec.") && !used[path] && !never(path) {
				t.Errorf("%s: the default of %s is never left out", kind, path)
			}
		}
	}
}

// asClient reads YAML as a Kubernetes client reads JSON: whole numbers are int64.
func asClient(t *testing.T, text []byte, into any) {
	t.Helper()
	b, err := yaml.YAMLToJSON(text)
	if err == nil {
		err = json.Unmarshal(b, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// anyPath writes the two ways to match every path, and the ways to have no match, as one (contract 10.2).
func anyPath(r *model.Route) {
	for i := range r.Rules {
		rule := &r.Rules[i]
		for j := range rule.Matches {
			if m := &rule.Matches[j]; m.PathKind == model.PathPrefix && m.Path == "/" {
				m.PathKind, m.Path = model.PathAny, ""
			}
		}
		if len(rule.Matches) == 1 && reflect.DeepEqual(rule.Matches[0], model.Match{}) {
			rule.Matches = nil
		}
	}
}

// defaultsOf gathers the paths of a schema that have a default.
func defaultsOf(schema map[string]any, path string, out *[]string) {
	if _, ok := schema["default"]; ok {
		*out = append(*out, path)
	}
	if items, ok := schema["items"].(map[string]any); ok {
		defaultsOf(items, path+"[]", out)
	}
	for name, p := range properties(schema) {
		defaultsOf(p, strings.TrimPrefix(path+"."+name, "."), out)
	}
}

func properties(schema map[string]any) map[string]map[string]any {
	out := map[string]map[string]any{}
	props, _ := schema["properties"].(map[string]any)
	for name, p := range props {
		out[name], _ = p.(map[string]any)
	}
	return out
}

// withDefaults writes the defaults of a schema into a value as an API server does: where the
// field is not there and what holds it is.
func withDefaults(schema map[string]any, value any, path string, used map[string]bool) {
	switch v := value.(type) {
	case []any:
		items, _ := schema["items"].(map[string]any)
		for _, e := range v {
			withDefaults(items, e, path+"[]", used)
		}
	case map[string]any:
		for name, p := range properties(schema) {
			at := strings.TrimPrefix(path+"."+name, ".")
			if _, there := v[name]; !there {
				def, ok := p["default"]
				if !ok {
					continue
				}
				used[at] = true
				b, _ := json.Marshal(def) // a copy
				var own any
				_ = json.Unmarshal(b, &own)
				v[name] = own
			}
			withDefaults(p, v[name], at, used)
		}
	}
}
