package dataplane_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"aether/dataplane/telemetry"
)

// TestAuditIsTold: filters in mode AUDIT, of a route, of a service and of a pod, ALLOW and DENY, let every request
// through; each is counted as asked, by what it would have done, and the entry of a request names the first that would have
// denied it, and the policy that held. What a filter in force denies is denied, and counted once.
func TestAuditIsTold(t *testing.T) {
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	other := w.pod("other", "other", "other", "127.1.0.8")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	port := w.app()
	proxy := map[string]string{
		"web":   w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web)),
		"other": w.listen(other.Engine, "127.0.0.1:0", w.out.AcceptProxy(other)),
	}
	w.apply(strings.ReplaceAll(`
service shop/cart 127.0.0.2
pods shop/cart PORT ip=127.1.0.1 pod=cart-1
local shop/web cid=web
local shop/other cid=other
local shop/cart PORT cid=cart1
filter shop/allow rbac audit policy=p;ns:none
filter shop/deny rbac audit deny policy=q;ns:shop;path:/route/private
filter shop/strict rbac policy=r;ns:none
filter shop/in scope=inbound target=cart rbac audit deny policy=s;id:spiffe://td/ns/shop/sa/other
route shop/cart cart
rule match=prefix:/route use=deny use=allow
rule match=prefix:/both use=allow use=strict
`, "PORT", fmt.Sprint(port)))
	metrics := telemetry.New(telemetry.Config{})
	metrics.Audits(&w.out.Audits, "outbound")
	metrics.Audits(&w.in.Audits, "inbound")
	series := func() string {
		rec := httptest.NewRecorder()
		metrics.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
		var out []string
		for l := range strings.Lines(rec.Body.String()) {
			if strings.HasPrefix(l, "aether_audit_") {
				out = append(out, l)
			}
		}
		return strings.Join(out, "")
	}
	for _, tt := range []struct {
		from, path        string
		status            int
		outbound, inbound string // filter and policy of the entry
	}{
		{"web", "/", 200, " ", " "},
		{"other", "/", 200, " ", "HTTPFilter shop/in s"},
		{"web", "/route", 200, "HTTPFilter shop/allow ", " "},
		{"web", "/route/private", 200, "HTTPFilter shop/deny q", " "},
		{"other", "/route/private", 200, "HTTPFilter shop/deny q", "HTTPFilter shop/in s"},
		{"web", "/both", 403, "HTTPFilter shop/allow ", ""},
	} {
		tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", proxy[tt.from])
		}}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("http://cart.shop.aether.internal:%d%s", port, tt.path), nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if res.StatusCode != tt.status {
			t.Errorf("%s %s: %d, want %d", tt.from, tt.path, res.StatusCode, tt.status)
		}
		entries := 1
		if tt.status == 200 {
			entries = 2
		}
		for range entries {
			select {
			case e := <-w.journal.ch:
				want := tt.outbound
				if e.Dir.String() == "inbound" {
					want = tt.inbound
				}
				if got := e.AuditFilter + " " + e.AuditPolicy; got != want {
					t.Errorf("%s %s, %s: %q would have denied it, want %q", tt.from, tt.path, e.Dir, got, want)
				}
				if told := strings.Contains(e.String(), "would deny it"); told != (e.AuditFilter != "") {
					t.Errorf("%s %s: %s", tt.from, tt.path, e.String())
				}
			case <-ctx.Done():
				t.Fatal("nothing was recorded")
			}
		}
	}
	want := `aether_audit_requests_total{direction="inbound",filter="shop/in",result="allowed"} 3
aether_audit_requests_total{direction="inbound",filter="shop/in",result="denied"} 2
aether_audit_requests_total{direction="outbound",filter="shop/allow",result="allowed"} 0
aether_audit_requests_total{direction="outbound",filter="shop/allow",result="denied"} 4
aether_audit_requests_total{direction="outbound",filter="shop/deny",result="allowed"} 1
aether_audit_requests_total{direction="outbound",filter="shop/deny",result="denied"} 2
`
	if got := series(); got != want {
		t.Errorf("counted\n%swant\n%s", got, want)
	}
}
