package model_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

func dst(s string) model.OrigDst { return model.OrigDst{AddrPort: netip.MustParseAddrPort(s)} }

func TestFlowText(t *testing.T) {
	for _, tt := range []struct {
		text string
		flow model.Flow
	}{
		{"shop/web > 10.96.0.10:8080 http1 host=cart:8080", model.Flow{Namespace: "shop", Workload: "web", Dir: model.Captured, Dst: dst("10.96.0.10:8080"), Sniff: model.SniffHTTP11, Host: "cart:8080"}},
		{"shop/web@c0ffee > [fd00::1]:80", model.Flow{Namespace: "shop", Workload: "web", Container: "c0ffee", Dir: model.Captured, Dst: dst("[fd00::1]:80")}},
		{"shop/web > proxy h2c host=cart:8080", model.Flow{Namespace: "shop", Workload: "web", Dir: model.Proxy, Sniff: model.SniffH2C, Host: "cart:8080"}},
		{"shop/cart < 8080 h2c peer=spiffe://td/ns/shop/sa/web", model.Flow{Namespace: "shop", Workload: "cart", Dir: model.Inbound, Dst: model.OrigDst{AddrPort: netip.AddrPortFrom(netip.Addr{}, 8080)}, Sniff: model.SniffH2C, Peer: "spiffe://td/ns/shop/sa/web"}},
		{"shop/web > 10.96.0.10:8080 waited", model.Flow{Namespace: "shop", Workload: "web", Dir: model.Captured, Dst: dst("10.96.0.10:8080"), Waited: true}},
		{"/web > 1.2.3.4:1 silent", model.Flow{Workload: "web", Dir: model.Captured, Dst: dst("1.2.3.4:1"), Sniff: model.SniffSilent}},
		{`shop/web > 1.2.3.4:1 http10 host="a b\"c"`, model.Flow{Namespace: "shop", Workload: "web", Dir: model.Captured, Dst: dst("1.2.3.4:1"), Sniff: model.SniffHTTP10, Host: `a b"c`}},
	} {
		got, err := model.ParseFlow(tt.text)
		if err != nil || got != tt.flow {
			t.Errorf("ParseFlow(%q) = %+v, %v", tt.text, got, err)
		}
		if s := tt.flow.String(); s != tt.text {
			t.Errorf("String = %q, want %q", s, tt.text)
		}
	}
}

func TestFlowTextErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                              "at least 3",
		"shop/web >":                    "at least 3",
		"web > 1.2.3.4:1":               "not namespace/account",
		"a/b/c > 1.2.3.4:1":             "not namespace/account",
		"a/ > 1.2.3.4:1":                "not namespace/account",
		"a/b@ > 1.2.3.4:1":              "after the @",
		"a/b = 1.2.3.4:1":               "direction",
		"a/b > 1.2.3.4":                 "destination",
		"a/b < http":                    "destination",
		"a/b < 65536":                   "destination",
		"a/b > 1.2.3.4:1 http3":         "http3",
		"a/b > 1.2.3.4:1 waited waited": "twice",
		"a/b > 1.2.3.4:1 tls opaque":    "twice",
		"a/b > 1.2.3.4:1 host=a host=b": "twice",
		"a/b > 1.2.3.4:1 host=":         "nothing after",
		`a/b > 1.2.3.4:1 host="a`:       "quote",
		"a/b > 1.2.3.4:1 color=red":     "unknown",
	} {
		if f, err := model.ParseFlow(text); err == nil || !strings.Contains(err.Error(), want) || f != (model.Flow{}) {
			t.Errorf("ParseFlow(%q) = %+v, %v; want an error with %q", text, f, err, want)
		}
	}
}

func TestRequestText(t *testing.T) {
	h, err := model.ParseRequest(`GET cart:8080/items?x=1 h:Version=2 h:note="a b" upgrade=websocket`)
	if err != nil {
		t.Fatal(err)
	}
	if string(h.Method) != "GET" || string(h.Authority) != "cart:8080" || string(h.Path) != "/items?x=1" || string(h.Upgrade) != "websocket" ||
		string(h.Scheme) != "http" || h.Minor != 1 || len(h.Fields) != 2 || string(h.Fields[0].Name) != "version" || string(h.Fields[1].Value) != "a b" {
		t.Errorf("%+v", h)
	}
	for _, text := range []string{"GET cart:8080/items?x=1 h:version=2", "OPTIONS cart:8080*", "CONNECT cart:8080", "GET /", "GET x/ h:a= upgrade=websocket", `GET x/ h:a="1 2"`} {
		h, err := model.ParseRequest(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
		} else if got := model.RequestString(&h); got != text {
			t.Errorf("%q came back as %q", text, got)
		}
	}
	for text, want := range map[string]string{
		"":                           "needed",
		"GET":                        "needed",
		"G(T x/":                     "no method",
		"GET x/ version=2":           "unknown",
		"GET x/ h:version":           "unknown",
		"GET x/ h:ver:sion=1":        "no field",
		`GET x/ h:a="1\n"`:           "no field",
		"GET x/ upgrade=":            "protocol",
		`GET x/ h:a="1`:              "quote",
		`GET x/ h:a=1"2"`:            "quote",
		`GET "x/`:                    "quote",
		"GET x/ upgrade=a upgrade=b": "unknown",
	} {
		if _, err := model.ParseRequest(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseRequest(%q): %v; want an error with %q", text, err, want)
		}
	}
}

// TestRandomText: what the data plane asks about survives its text form.
func TestRandomText(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 5000 {
		f := modeltest.RandomFlow(r)
		if got, err := model.ParseFlow(f.String()); err != nil || got != f {
			t.Fatalf("%q: %+v, %v", f, got, err)
		}
		h := modeltest.RandomRequest(r)
		if h.Method != nil && string(h.Path) == "" && strings.ContainsAny(string(h.Authority), "/*") {
			continue
		}
		got, err := model.ParseRequest(model.RequestString(&h))
		if err != nil || !equalHeads(&got, &h) {
			t.Fatalf("%q: %+v, %v", model.RequestString(&h), got, err)
		}
	}
}

func equalHeads(a, b *httpmsg.Head) bool {
	return string(a.Method) == string(b.Method) && string(a.Authority) == string(b.Authority) && string(a.Path) == string(b.Path) &&
		string(a.Upgrade) == string(b.Upgrade) &&
		slices.EqualFunc(a.Fields, b.Fields, func(x, y httpmsg.Field) bool {
			return string(x.Name) == string(y.Name) && string(x.Value) == string(y.Value)
		})
}

// FuzzFlowText: what ParseFlow accepts, String writes so that it is read as the same.
func FuzzFlowText(f *testing.F) {
	f.Add("shop/web@c > 10.96.0.10:8080 http1 host=cart:8080")
	f.Add("shop/cart < 8080 h2c peer=spiffe://td/ns/shop/sa/web")
	f.Add("shop/cart < [fe80::1%eth0]:8080 h2c")
	f.Add(`"a b/c"@"d e" > proxy host="\x00\u1234"`)
	f.Fuzz(func(t *testing.T, text string) {
		a, err := model.ParseFlow(text)
		if err != nil {
			return
		}
		if b, err := model.ParseFlow(a.String()); err != nil || a != b {
			t.Fatalf("%q: %+v writes %q, read as %+v, %v", text, a, a.String(), b, err)
		}
	})
}

// FuzzRequestText: the same for requests.
func FuzzRequestText(f *testing.F) {
	f.Add("GET cart:8080/items?x=1 h:version=2")
	f.Add(`OPTIONS cart:8080* h:a="b c" upgrade=x`)
	f.Add(`CONNECT "a\x80b"`)
	f.Fuzz(func(t *testing.T, text string) {
		a, err := model.ParseRequest(text)
		if err != nil {
			return
		}
		if b, err := model.ParseRequest(model.RequestString(&a)); err != nil || !equalHeads(&a, &b) {
			t.Fatalf("%q: %+v writes %q, read as %+v, %v", text, a, model.RequestString(&a), b, err)
		}
	})
}
