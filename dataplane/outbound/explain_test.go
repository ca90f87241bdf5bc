package outbound

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"aether/dataplane/decide"
	"aether/dataplane/detect/detecttest"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/e2e/testseed"
)

// TestExplainIsTheWire: for any authority, explain has the answer that the wire has: captured at an HTTP port and
// at a foreign address, and on the proxy port; HTTP/1 and h2c, whose malformed requests are reset (RFC 9113 8.1.1).
func TestExplainIsTheWire(t *testing.T) {
	g := newGateway(t, firstBytesMesh)
	snap := g.o.cfg.Store.Load()
	r := testseed.Rand(t)
	one := func(all ...string) string { return all[r.IntN(len(all))] }
	seen := map[string]int{}
	for i := range 900 {
		host := one("cart", "cart.shop.aether.internal", "CART.shop", "db", "other.example", "nobody.shop.aether.internal", "", "10.96.0.1", "[::1]", "[::1", "ca rt", "a%41", "x_y", "cart.", "a/b", "a\\b", "a,b", "\xc3\xa4")
		authority := one("", "", "", "", "u@", "u:p@", "@") + host + one("", "", ":8080", ":8080", ":7777", ":0", ":00", ":08080", ":80", ":", ":8080:8080", ":http", ":65535", ":65536", ":99999", ":-1", ":18081", ":18001")
		if r.IntN(5) == 0 && len(authority) > 0 {
			b := []byte(authority)
			b[r.IntN(len(b))] = byte(0x21 + r.IntN(0x5e))
			authority = string(b)
		}
		h2 := i%2 == 1
		if h2 && authority == "" || strings.Trim(authority, " ") != authority { // a field's value has no blanks around it
			continue
		}
		dst := []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:8080"), netip.MustParseAddrPort("203.0.113.5:8080"), {}}[r.IntN(3)]
		f := model.Flow{Namespace: "shop", Workload: "web", Container: "shop-web-0", Dir: model.Captured, Dst: model.OrigDst{AddrPort: dst}, Sniff: model.SniffHTTP11, Host: authority}
		in := "GET / HTTP/1.1\r\nHost: " + authority + "\r\n\r\n"
		if !dst.IsValid() {
			f.Dir, f.Dst = model.Proxy, model.OrigDst{}
		}
		if h2 {
			f.Sniff, in = model.SniffH2C, detecttest.Get(authority)
		}
		v, _ := decide.Explain(snap, &f, &httpmsg.Head{Method: []byte("GET"), Scheme: []byte("http"), Authority: []byte(authority), Path: []byte("/"), Minor: 1})
		want := fmt.Sprint(v.Status)
		if v.Action == decide.Passthrough {
			want = "passed"
		}
		got := ""
		if h2 {
			got = g.h2Status(dst, in)
		} else {
			got = status(g.send(dst, in))
		}
		if seen[want]++; got != want {
			t.Errorf("%s: %s on the wire, explained %s", f, got, v)
		}
	}
	for _, s := range []string{"400", "404", "421", "503", "passed"} {
		if seen[s] < 10 {
			t.Errorf("%d answers are %s: the test shows nothing of them", seen[s], s)
		}
	}
}
