package admin

import (
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/journal"
	"aether/dataplane/model"
)

func TestParseFilter(t *testing.T) {
	for query, want := range map[string]string{
		"":                            "",
		"n=5&bad=1":                   "",
		"bad=false&pod=a/b&service=c": `service: "c" is not namespace/name, with a service's name after the slash`,
		"n=0":                         `n: "0" is no positive number`,
		"n=1e3":                       `n: "1e3" is no positive number`,
		"bad=yes":                     `bad: "yes" is neither 1 nor 0`,
		"pod=web":                     `pod: "web" is not namespace/name, with a pod's name or its ServiceAccount's after the slash`,
		"pod=/web":                    `pod: "/web" is not`,
		"pod=a/b/c":                   `pod: "a/b/c" is not`,
		"reason=loop,lop":             `reason: there is no "lop"; the reasons are `,
		"reason=,":                    `reason: there is no ""; the reasons are `,
	} {
		q, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		f, err := ParseFilter(q)
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", query, err)
		case want != "" && (err == nil || !strings.HasPrefix(err.Error(), want)):
			t.Errorf("%s: %v, want %s", query, err, want)
		case err == nil:
			if again, err := ParseFilter(f.Values()); err != nil || again.Lines != f.Lines || again.Bad != f.Bad || again.Pod != f.Pod {
				t.Errorf("%s: written and read again it is %+v, %v", query, again, err)
			}
		}
	}
	f := Filter{Lines: 3, Bad: true, Pod: "a/b", Reasons: []string{decide.Loop.String(), decide.Idle.String()}, Service: "c/d"}
	if got := f.Values().Encode(); got != "bad=1&n=3&pod=a%2Fb&reason=loop%2Cidle&service=c%2Fd" {
		t.Error(got)
	}
}

// TestChoose: which entries concern a pod and a service.
func TestChoose(t *testing.T) {
	s := shop(t)
	entries := map[string]func(*journal.Entry){
		"by backend":             func(e *journal.Entry) { e.Backend = "shop/cart:8080" },
		"by rule":                func(e *journal.Entry) { e.Rule = "Service shop/cart" },
		"by short name":          func(e *journal.Entry) { e.Host.SetString("cart:1") },
		"by full name":           func(e *journal.Entry) { e.Host.SetString("CART.shop.aether.internal") },
		"by address":             func(e *journal.Entry) { e.Dst = netip.MustParseAddrPort("10.96.0.10:1") },
		"inbound":                func(e *journal.Entry) { e.Dir, e.Workload = model.Inbound, "cart" },
		"not another's":          func(e *journal.Entry) { e.Backend = "shop/cart-v2:8080" },
		"not by a longer name":   func(e *journal.Entry) { e.Rule = "Service shop/carts" },
		"not by short name else": func(e *journal.Entry) { e.Namespace = "pay"; e.Host.SetString("cart") },
		"not foreign":            func(e *journal.Entry) { e.Host.SetString("example.org") },
		"not inbound elsewhere":  func(e *journal.Entry) { e.Dir = model.Inbound; e.Host.SetString("cart") },
	}
	for name, set := range entries {
		ring := journal.NewRing(4)
		e := journal.Entry{Namespace: "shop", Workload: "web", Dir: model.Captured}
		set(&e)
		ring.Ended(&e)
		got := len(Filter{Lines: 10, Service: "shop/cart"}.choose(ring, s)) == 1
		if want := !strings.HasPrefix(name, "not "); got != want {
			t.Errorf("%s: chosen %v, want %v", name, got, want)
		}
	}
	ring := journal.NewRing(8)
	for i := range 6 {
		ring.Ended(&journal.Entry{Namespace: "shop", Workload: []string{"web", "job"}[i%2], Pod: []string{"web-0", "web-9"}[i%2], At: time.Unix(int64(i), 0), Reason: "loop"})
	}
	for pod, want := range map[string]int{"": 3, "shop/web": 3, "shop/" + s.WorkloadOf(&model.Flow{Namespace: "shop", Workload: "web"}).Pod: 3, "shop/job": 3, "shop/web-9": 3, "pay/web": 0, "pay/web-9": 0} {
		got := Filter{Lines: 3, Pod: pod}.choose(ring, s)
		if len(got) != want {
			t.Errorf("%q: %d entries, want %d", pod, len(got), want)
		}
		for i := 1; i < len(got); i++ {
			if got[i].At.After(got[i-1].At) {
				t.Errorf("%q: not the newest first", pod)
			}
		}
	}
}

// TestDecision: what a decision says of a flow and a request can be asked about.
func TestDecision(t *testing.T) {
	e := journal.Entry{
		At: time.Unix(1, 0), Took: 1500 * time.Microsecond, Request: true, Dir: model.Captured, Namespace: "shop", Workload: "web",
		Dst: netip.MustParseAddrPort("10.96.0.10:8080"), Sniff: model.SniffHTTP11, Action: "refuse", Reason: "port-mismatch", Status: 421,
	}
	e.Host.SetString("cart:9090")
	e.Method.SetString("GET")
	e.Path.SetString(`/a"b`)
	d := decisionOf(&e)
	x, err := Explain(shop(t), d.Flow, d.Request)
	if err != nil || x.Reason != d.Reason || x.Status != d.Status || x.Flow != d.Flow || x.Request != d.Request {
		t.Errorf("%+v: %+v, %v", d, x, err)
	}
	if d.Kind != "request" || d.TookMS != 1.5 || !d.Bad {
		t.Errorf("%+v", d)
	}
}
