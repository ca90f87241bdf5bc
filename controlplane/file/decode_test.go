package file

import (
	"fmt"
	"strings"
	"testing"
)

// load writes nothing to disk: it parses text as the file shop.yaml and builds.
func load(t testing.TB, o Options, text string) (string, []string) {
	t.Helper()
	l := newLoader("", o)
	l.files["shop.yaml"] = parse("shop.yaml", []byte(text), l.o, nil)
	m, problems := l.build()
	var out []string
	for _, p := range problems {
		out = append(out, fmt.Sprintf("%s: %s: %s", p.Where, p.Object, p.Reason))
	}
	return render(m), out
}

const goodPod = `apiVersion: v1
kind: Pod
metadata: {name: good, namespace: shop, labels: {aether.io/managed: "true"}}
spec: {serviceAccountName: good, nodeName: n2}
status: {podIPs: [{ip: 10.0.0.9}]}
`

// TestStrict: each mistake is found on its line, with a mend, and the good pod
// before and after it is served all the same.
func TestStrict(t *testing.T) {
	for _, tt := range []struct{ name, doc, want string }{
		{"unknown field", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  clusterIPs: [10.96.0.1]
  prots: [{port: 80}]
`, `shop.yaml:12: Service shop/cart: unknown field "spec.prots" (did you mean "ports"?): correct or remove it; the object is not in force`},
		{"unknown field, nothing near", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
bogus: 1
`, `shop.yaml:10: Service shop/cart: unknown field "bogus": correct or remove it;`},
		{"field of another case", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  clusterIps: [10.96.0.1]
`, `shop.yaml:11: Service shop/cart: unknown field "spec.clusterIps" (did you mean "clusterIPs"?)`},
		{"unquoted number in an annotation", `apiVersion: v1
kind: Pod
metadata:
  name: cart
  namespace: shop
  labels: {aether.io/managed: "true"}
  annotations:
    endpoint.aether.io/port: 8080
status: {podIP: 10.0.0.1}
`, `shop.yaml:14: Pod shop/cart: field "metadata.annotations.endpoint.aether.io/port" is a number where text is expected: put it in quotes: "8080"`},
		{"unquoted true in a label", `apiVersion: v1
kind: Pod
metadata:
  name: cart
  labels:
    aether.io/managed: true
`, `shop.yaml:12: Pod default/cart: field "metadata.labels.aether.io/managed" is true or false where text is expected: put it in quotes: "true"`},
		{"text for a number", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  ports:
  - port: "80"
`, `shop.yaml:12: Service shop/cart: field "spec.ports[0].port" is text where a whole number is expected: write a whole number, without quotes`},
		{"number out of range", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  ports:
  - port: 99999999999
`, `shop.yaml:12: Service shop/cart: field "spec.ports[0].port" is 99999999999, which does not fit, where a whole number is expected`},
		{"map for a list", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  ports:
    port: 80
`, `shop.yaml:12: Service shop/cart: field "spec.ports" is a map where a list is expected: write a list`},
		{"same field twice", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  clusterIP: 10.96.0.1
  clusterIP: 10.96.0.2
`, `shop.yaml:12: Service shop/cart: field "spec.clusterIP" stands twice, first on line 11: keep one`},
		{"a time that is none", `apiVersion: v1
kind: Pod
metadata:
  name: cart
  deletionTimestamp: yesterday
`, `shop.yaml:11: Pod default/cart: field "metadata.deletionTimestamp" cannot be read: parsing time`},
		{"merge key", `apiVersion: v1
kind: Service
metadata: &m {name: cart, namespace: shop}
spec:
  <<: *m
`, `shop.yaml:11: Service shop/cart: merge key <<: not read by this source`},
		{"alias ring", `apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  selector: &a
    b: *a
`, `shop.yaml:11: Service shop/cart: `},
		{"not YAML", `apiVersion: v1
kind: Service
metadata: {name: cart
spec: x
`, `shop.yaml:9: document: not YAML: did not find expected ',' or '}': correct it; nothing of this document is in force (it begins on line 6)`},
		{"tab", "apiVersion: v1\nkind: Service\nmetadata:\n\tname: cart\n", `shop.yaml:10: document: not YAML: found character that cannot start any token`},
		{"a control character", "apiVersion: v1\nkind: Service\nmetadata: {name: x\x01}\n", `shop.yaml:9: document: not YAML: control characters are not allowed`},
		{"an anchor that is not there", "apiVersion: v1\nkind: *nothing\n", `shop.yaml:8: document: not YAML: unknown anchor 'nothing' referenced`},
		{"bad indentation", "apiVersion: v1\nkind: Service\nmetadata:\n  name: x\n namespace: y\n", `shop.yaml:11: document: not YAML: did not find expected key`},
		{"plain text", "hello\n", `shop.yaml:7: document: text where a Kubernetes object is expected`},
		{"a list", "- a\n", `shop.yaml:7: document: a list where a Kubernetes object is expected`},
		{"no kind", "apiVersion: v1\nmetadata: {name: x}\n", `shop.yaml:7: document: no kind`},
		{"another kind", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x, namespace: shop}\n", `shop.yaml:8: Deployment shop/x: kind Deployment (apps/v1) is not of the mesh and is ignored`},
		{"another version", "apiVersion: v2\nkind: Pod\nmetadata: {name: x, namespace: shop}\n", `shop.yaml:7: Pod shop/x: apiVersion "v2" of a Pod is not read: write v1`},
		{"no name", "apiVersion: v1\nkind: Pod\nmetadata: {namespace: shop}\n", `shop.yaml:9: Pod shop/: metadata.name "" cannot be a name`},
		{"name with a slash", "apiVersion: v1\nkind: Pod\nmetadata: {name: ../x}\n", `shop.yaml:9: Pod default/../x: metadata.name "../x" cannot be a name`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := goodPod + "---\n" + tt.doc + "---\n" + strings.ReplaceAll(goodPod, "good", "best")
			text = strings.Replace(text, "10.0.0.9", "10.0.0.8", 1)
			mesh, problems := load(t, Options{}, text)
			if len(problems) != 1 || !strings.HasPrefix(problems[0], tt.want) {
				t.Errorf("got  %s\nwant %s", strings.Join(problems, "\n     "), tt.want)
			}
			if strings.Count(mesh, "\n") != 1+2 || !strings.Contains(mesh, "endpoint shop/good") || !strings.Contains(mesh, "endpoint shop/best") {
				t.Errorf("not exactly the good pods are served:\n%s", mesh)
			}
		})
	}
}

// TestAliasBomb: nine levels of nine aliases are 400 million values.
func TestAliasBomb(t *testing.T) {
	text := "apiVersion: v1\nkind: Pod\nmetadata:\n  name: bomb\n  managedFields:\n  - fieldsV1:\n      a: &a [x, x, x, x, x, x, x, x, x]\n"
	for c := 'b'; c <= 'i'; c++ {
		text += fmt.Sprintf("      %c: &%c [%s]\n", c, c, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*%c, ", c-1), 9), ", "))
	}
	_, problems := load(t, Options{}, text)
	if len(problems) == 0 || !strings.Contains(problems[0], "aliases expand to more than") {
		t.Errorf("got %q", problems)
	}
}

func TestSplit(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"", ""},
		{"a", "1:a"},
		{"a\n---\nb\n", "1:a|2:---;b"},
		{"---\na\n---\nb", "1:---;a|3:---;b"},
		{"---\n---\n# only words\n---\na", "4:---;a"},
		{"--- {a: b}\n---\tc\n", "1:--- {a: b}|2:---\tc"},
		{"a\n...\nb\n...\n", "1:a|3:b"},
		{"%YAML 1.2\n---\na\n", "2:---;a"},
		{"a: |\n  ---\n  b\n", "1:a: |;  ---;  b"},
		{"----\n---x\n", "1:----;---x"},
		{"\xef\xbb\xbf---\r\na\r\n---\r\nb\r\n", "1:---;a|3:---;b"},
	} {
		var got []string
		for _, d := range split([]byte(tt.in)) {
			text := strings.TrimRight(strings.ReplaceAll(string(d.text), "\r", ""), "\n")
			got = append(got, fmt.Sprintf("%d:%s", d.base+1, strings.ReplaceAll(text, "\n", ";")))
		}
		if g := strings.Join(got, "|"); g != tt.want {
			t.Errorf("%q\ngot  %q\nwant %q", tt.in, g, tt.want)
		}
	}
}

// FuzzParse: no text stops the reader, every problem has a place and words, and
// a document appended behind its own marker is read whatever stands before it.
func FuzzParse(f *testing.F) {
	f.Add(goodPod)
	f.Add("%oops")
	f.Add("a: &a [*a]\n---\n")
	f.Add("apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: x}, spec: {ports: [{port: 80, targetPort: x}]}}\n")
	f.Add("apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{kind: Service, name: s}], rules: [{matches: [{path: {type: Q}}], x: 1}]}\n")
	seeds, err := filesBelow("testdata")
	if err != nil {
		f.Fatal(err)
	}
	for _, b := range seeds {
		for _, doc := range split(b) {
			f.Add(string(doc.text))
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		p := parse("x.yaml", []byte(text+"\n---\n"+goodPod), Options{}.withDefaults(), nil)
		if n := len(p.items); n == 0 || p.items[n-1].object != "Pod shop/good" {
			t.Fatalf("the good pod is lost: %+v", p.items)
		}
		for _, pr := range p.problems {
			if pr.Object == "" || pr.Reason == "" || pr.File != "x.yaml" || pr.Line < 1 || pr.Line > strings.Count(text, "\n")+9 {
				t.Fatalf("problem %+v", pr)
			}
		}
		l := newLoader("", Options{})
		l.files["x.yaml"] = p
		l.build()
	})
}
