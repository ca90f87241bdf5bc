package decide_test

import (
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

// TestTooLarge: what is larger than rules look at is refused, and never given to the
// rule behind, which may let it pass.
func TestTooLarge(t *testing.T) {
	s, problems := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart 8080,8081,8082,9090
local shop/web
filter shop/no rbac policy=p;ns:none
filter shop/edit query=set:a:1
route shop/f cart:8080
rule match=prefix:/f&hr:x-a=.*1.* use=no
rule match=prefix:/h&hr:host=a.* use=no
rule match=prefix:/q&qr:v=.*1.* use=no
rule match=prefix:/e&q:v=1 use=no
rule match=prefix:/w use=edit
rule match=prefix:/p&POST&hr:x-a=.*
route shop/r cart:8081
rule match=regex:/a.* use=no
route shop/plain cart:8082
rule match=prefix:/f&h:x-a=1
grpcroute shop/calls cart:9090
rule match=grpcr:a.*/Say use=no
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	long, most := strings.Repeat("1", 8193), strings.Repeat("1", 8192)
	const self, too = "forward (declared-http)", "refuse 431 (too-large)"
	for _, tt := range []struct {
		port, target string
		fields       []string
		want         string
	}{
		{"8080", "/f", []string{long}, too},
		{"8080", "/f", []string{most}, "refuse 403 (rbac-denied)"},
		{"8080", "/f", []string{most[:4096], most[:4096]}, too}, // and the comma
		{"8080", "/f", []string{most[:4096], most[:4095]}, "refuse 403 (rbac-denied)"},
		{"8080", "/x", []string{long}, self}, // no expression is run on it
		{"8080", "/p", []string{long}, self},
		{"8082", "/f", []string{long}, self},
		{"8080", "/q?v=" + long, nil, too},
		{"8080", "/q?v=" + most, nil, "refuse 403 (rbac-denied)"},
		{"8080", "/q?v=" + strings.Repeat("%31", 8192), nil, "refuse 403 (rbac-denied)"},
		{"8080", "/q?w=" + long, nil, self},
		{"8080", "/e?v=" + long, nil, self},
		{"8080", "/e?" + strings.Repeat("a&", 255) + "v=1", nil, "refuse 403 (rbac-denied)"},
		{"8080", "/e?" + strings.Repeat("a&", 256) + "v=1", nil, too},
		{"8080", "/e?v=1" + strings.Repeat("&", 256), nil, too},
		{"8080", "/x?" + strings.Repeat("a&", 300), nil, self},
		{"8080", "/w?" + strings.Repeat("a&", 255) + "a", nil, "forward (http-route)"},
		{"8080", "/w?" + strings.Repeat("a&", 256) + "a", nil, too},
		{"8081", "/a" + most[:8190], nil, "refuse 403 (rbac-denied)"},
		{"8081", "/a" + long, nil, too},
		{"8081", "/%61" + most[:8191], nil, too},
		{"9090", "/a" + long + "/Say", nil, too},
		{"9090", "/a" + most[:4000] + "/Say", nil, "refuse 403 (rbac-denied)"},
	} {
		f, err := model.ParseFlow("shop/web > 10.96.0.1:" + tt.port + " http1")
		if err != nil {
			t.Fatal(err)
		}
		h := httpmsg.Head{Method: []byte("GET"), Scheme: []byte("http"), Authority: []byte("cart"), Path: []byte(tt.target), Minor: 1}
		for _, v := range tt.fields {
			h.Fields = append(h.Fields, httpmsg.Field{Name: []byte("x-a"), Value: []byte(v)})
		}
		v := decide.Route(s, &f, &h, 0, nil)
		v.Backend, v.Rule = nil, ""
		if got := v.String(); got != tt.want {
			t.Errorf("%s%.20s (%d bytes) %d fields: %s, want %s", tt.port, tt.target, len(tt.target), len(tt.fields), got, tt.want)
		}
	}
}

// TestPreflightNamesAreBounded: the names that a preflight asks about are looked at up to a bound where a rule hangs on fields; beyond it
// the preflight is refused, and not given to the rule behind.
func TestPreflightNamesAreBounded(t *testing.T) {
	s, problems := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart 8080
local shop/web
route shop/r cart:8080
rule name=field match=prefix:/f&h:x-api=2 cors=https://a.example;headers=x-api
rule name=behind match=prefix:/f
rule name=plain match=prefix:/p cors=https://a.example
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	for _, tt := range []struct {
		path string
		size int
		want string
	}{
		{"/f", 1024, "reply 204 (cors-preflight)"},
		{"/f", 1025, "refuse 431 (too-large)"},
		{"/p", 1025, "reply 204 (cors-preflight)"}, // hangs on no field
	} {
		f, err := model.ParseFlow("shop/web > 10.96.0.1:8080 http1")
		if err != nil {
			t.Fatal(err)
		}
		h := httpmsg.Head{Method: []byte("OPTIONS"), Scheme: []byte("http"), Authority: []byte("cart"), Path: []byte(tt.path), Minor: 1}
		names := strings.Repeat("a", tt.size-len(",x-api")) + ",x-api"
		h.Add([]byte("origin"), []byte("https://a.example"))
		h.Add([]byte("access-control-request-method"), []byte("GET"))
		h.Add([]byte("access-control-request-headers"), []byte(names))
		v := decide.Route(s, &f, &h, 0, nil)
		v.Backend, v.Rule = nil, ""
		if got := v.String(); got != tt.want {
			t.Errorf("%s with %d bytes of names: %s, want %s", tt.path, tt.size, got, tt.want)
		}
	}
}
