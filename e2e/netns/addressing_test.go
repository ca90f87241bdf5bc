package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// leg is a workload of contract 4.14.
type leg struct {
	name  string
	ports string // annotation endpoint.aether.io/ports
	port  string // annotation endpoint.aether.io/port, "" 8080
	http  []int
	tcp   []int
}

var legs = []leg{
	{name: "mp-httponly", ports: "8080", http: []int{8080}},
	{name: "mp-multi", ports: "8080,9090", http: []int{8080, 9090}},
	{name: "mp-eighty", ports: "80,8080,9090", http: []int{80, 8080, 9090}},
	{name: "mp-mixed", ports: "8080,9000=tcp", http: []int{8080}, tcp: []int{9000}},
	{name: "mp-tcpfirst", ports: "9000=tcp,8080=h1", port: "9000", http: []int{8080}, tcp: []int{9000}},
	{name: "mp-nine", ports: "9000", port: "9000", http: []int{9000}},
}

func (l *leg) mesh() string { return l.name + ".shop.aether.internal" }

func legNamed(name string) (uint8, *leg) {
	i := slices.IndexFunc(legs, func(l leg) bool { return l.name == name })
	return uint8(firstVIP + i), &legs[i]
}

func legPods() (pods []mesh.Pod) {
	for _, l := range legs {
		p := mesh.Pod{Name: l.name, Node: 1, Ports: l.ports, Annotations: map[string]string{}}
		if l.port != "" {
			p.Annotations["endpoint.aether.io/port"] = l.port
		}
		pods = append(pods, p)
	}
	return pods
}

// legApps: every port's application names itself and its port.
func legApps(ctx context.Context) error {
	var errs []error
	for i, l := range legs {
		s := &w.Pod(l.name).Space
		var all []uint16
		for _, port := range l.http {
			all = append(all, uint16(port))
			errs = append(errs, w.ServeHTTP(ctx, s, local(port), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprintf(w, "%s:%d http", l.name, port)
			})))
		}
		for _, port := range l.tcp {
			all = append(all, uint16(port))
			errs = append(errs, w.ServeTCP(ctx, s, local(port), func(c *net.TCPConn) {
				fmt.Fprintf(c, "%s:%d tcp\n", l.name, port)
				echo(c)
			}))
		}
		errs = append(errs, w.Service(rig.ServiceManifest{Name: l.name, ClusterIPs: w.ClusterIPs(uint8(firstVIP + i)), Ports: all}))
	}
	return errors.Join(errs...)
}

// asked is one request of a leg and what must come of it.
type asked struct {
	leg, from, dial, host, path string
	want                        string // "200 mp-nine:9000 http", "421 port-mismatch"
	body                        string // must be in the body, too
	limit                       time.Duration
}

func (a asked) run(t *testing.T) {
	t.Run(strings.ReplaceAll(fmt.Sprintf("%s/%s %s host %s", a.leg, a.from, a.dial, a.host), "/ ", " "), func(t *testing.T) {
		t.Helper()
		ctx := within(t, patience)
		start := time.Now()
		res := mustSend(t, ctx, transport(t, false, w.Pod(a.from), a.dial), "GET", a.host, "/"+a.path, nil)
		took := time.Since(start)
		got := fmt.Sprint(res.StatusCode)
		if e := res.Header.Get("X-Aether-Error"); e != "" {
			got += " " + e
		} else {
			got += " " + res.body
		}
		if !strings.HasPrefix(got, a.want) {
			t.Errorf("got  %s (%s)\nwant %s", got, res.body, a.want)
		}
		if !strings.Contains(res.body, a.body) {
			t.Errorf("body %q does not tell %q", res.body, a.body)
		}
		if a.limit > 0 && took > a.limit {
			t.Errorf("took %v, must be below %v", took, a.limit)
		}
	})
}

// TestLegs are the addressing legs of contract 4.14 that are HTTP.
func TestLegs(t *testing.T) {
	var all []asked
	add := func(a asked) { all = append(all, a) }
	for i, l := range legs {
		n := uint8(firstVIP + i)
		v6 := func(port int) string { return net.JoinHostPort(w.ClusterIPs(n)[1].String(), fmt.Sprint(port)) }
		var list string
		for _, p := range l.http {
			list = fmt.Sprint(p)
			want := fmt.Sprintf("200 %s:%d http", l.name, p)
			suffix := fmt.Sprintf(":%d", p)
			add(asked{leg: "A1", from: "web", dial: vip(n, p), host: l.mesh() + suffix, want: want})
			add(asked{leg: "A1", from: "web", dial: v6(p), host: l.mesh() + suffix, want: want})
			add(asked{leg: "A2", from: "web", dial: vip(n, p), host: l.name + ".shop.svc.cluster.local" + suffix, want: want})
			add(asked{leg: "A2", from: "web", dial: vip(n, p), host: l.name + ".shop.svc" + suffix, want: want})
			add(asked{leg: "A2", from: "web", dial: vip(n, p), host: l.name + ".shop" + suffix, want: want})
			add(asked{leg: "A2", from: "web", dial: vip(n, p), host: l.name + suffix, want: want})
			add(asked{leg: "A3", from: "job", dial: proxyPort, host: l.mesh() + suffix, want: want})
			add(asked{leg: "A3", from: "job", dial: "[::1]:18081", host: l.name + ".shop" + suffix, want: want})
			add(asked{leg: "A3", from: "web", dial: proxyPort, host: l.mesh() + suffix, want: want})
			if p != 80 {
				add(asked{leg: "A9", from: "web", dial: vip(n, p), host: l.mesh(), want: want})
			}
		}
		for _, host := range []string{l.mesh(), l.name + ".shop.svc.cluster.local"} {
			add(asked{leg: "A7", from: "web", dial: vip(n, 7777), host: host + ":7777", want: "421 port-not-declared", limit: time.Second})
			add(asked{leg: "A7", from: "web", dial: v6(7777), host: host + ":7777", want: "421 port-not-declared", limit: time.Second})
			add(asked{leg: "A7", from: "job", dial: proxyPort, host: host + ":7777", want: "421 port-not-declared", limit: time.Second})
			if l.name == "mp-eighty" {
				add(asked{leg: "R1", from: "web", dial: vip(n, 80), host: host, want: "200 mp-eighty:80 http"})
				add(asked{leg: "R1", from: "web", dial: v6(80), host: host, want: "200 mp-eighty:80 http"})
				add(asked{leg: "R1", from: "job", dial: proxyPort, host: host, want: "200 mp-eighty:80 http"})
				continue
			}
			add(asked{leg: "R2", from: "web", dial: vip(n, 80), host: host, want: "421 port-not-declared", body: list, limit: time.Second})
			add(asked{leg: "R2", from: "web", dial: v6(80), host: host, want: "421 port-not-declared", body: list, limit: time.Second})
			add(asked{leg: "R3", from: "job", dial: proxyPort, host: host, want: "421 port-required", body: list, limit: time.Second})
		}
		add(asked{leg: "R4", from: "web", dial: vip(n, 18081), host: l.mesh() + ":18081", want: "421 port-not-declared", limit: time.Second})
		add(asked{leg: "R4", from: "job", dial: vip(n, 18081), host: l.mesh() + ":18081", want: "421 port-not-declared", limit: time.Second})
		add(asked{leg: "R4", from: "job", dial: proxyPort, host: l.mesh() + ":18081", want: "421 port-not-declared", limit: time.Second})
	}
	multi, _ := legNamed("mp-multi")
	add(asked{leg: "A5", from: "web", dial: vip(multi, 8080), host: "mp-multi.shop.aether.internal:9090", want: "421 port-mismatch", limit: time.Second})
	add(asked{leg: "A6", from: "job", dial: proxyPort, host: "mp-mixed.shop.aether.internal:9000", want: "421 port-not-http", limit: time.Second})
	nine, _ := legNamed("mp-nine")
	add(asked{leg: "A10", from: "web", dial: vip(nine, 9000), host: "mp-nine.shop.aether.internal:9000", want: "200 mp-nine:9000 http"})
	// The rest of contract 4.3(b) and 4.5.
	add(asked{leg: "floor", from: "job", dial: proxyPort, host: "elsewhere.example", want: "404"})
	add(asked{leg: "floor", from: "job", dial: proxyPort, host: "nobody.shop.aether.internal:8080", want: "404"})
	add(asked{leg: "floor", from: "job", dial: proxyPort, host: "nobody.shop.aether.internal:18082", want: "421 port-not-declared", limit: time.Second})
	add(asked{leg: "case", from: "job", dial: proxyPort, host: "MP-Multi.Shop.AETHER.internal:8080", want: "200 mp-multi:8080 http"})
	add(asked{leg: "dot", from: "web", dial: vip(multi, 8080), host: "mp-multi.shop.svc.cluster.local.:8080", want: "200 mp-multi:8080 http"})
	add(asked{leg: "local", from: "job", dial: proxyPort, host: "anything.example", path: "aether/readyz", want: "200 ready"})
	for _, a := range all {
		a.run(t)
	}
}

// TestLegA4: a route without a parent port holds for every port, on both paths.
func TestLegA4(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	err := w.Write("leg-a4", `apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {namespace: shop, name: leg-a4}
spec:
  parentRefs: [{group: "", kind: Service, name: mp-multi}]
  rules:
  - filters:
    - type: ResponseHeaderModifier
      responseHeaderModifier: {set: [{name: x-leg, value: a4}]}
`)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Remove("leg-a4") })
	if err := w.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	n, l := legNamed("mp-multi")
	for _, tt := range []struct{ from, dial, host, want string }{
		{"web", vip(n, 9090), l.mesh() + ":9090", "mp-multi:9090 http"},
		{"job", proxyPort, l.mesh() + ":9090", "mp-multi:9090 http"},
		{"web", vip(n, 8080), "mp-multi", "mp-multi:8080 http"},
	} {
		a := mustSend(t, ctx, transport(t, false, w.Pod(tt.from), tt.dial), "GET", tt.host, "/", nil)
		if a.StatusCode != 200 || a.Header.Get("X-Leg") != "a4" || a.body != tt.want {
			t.Errorf("%s by %s: %d %q x-leg %q, want %q with the route's field", tt.host, tt.dial, a.StatusCode, a.body, a.Header.Get("X-Leg"), tt.want)
		}
	}
}

// TestLegsRaw are the legs that are not HTTP: A8, A11, A13, R5.
func TestLegsRaw(t *testing.T) {
	mixed, _ := legNamed("mp-mixed")
	first, _ := legNamed("mp-tcpfirst")
	nine, _ := legNamed("mp-nine")
	only, _ := legNamed("mp-httponly")
	const get = "GET / HTTP/1.1\r\nHost: mp-mixed.shop.aether.internal:9000\r\n\r\n"
	for _, tt := range []struct {
		name, from, dial, send string
		want                   string // "" no application answers
		limit                  time.Duration
	}{
		{"A8 bytes to an undeclared port", "web", vip(only, 7777), "ping\n", "", 3 * time.Second},
		{"A8 bytes to an undeclared port of a mixed service", "web", vip(mixed, 7777), "\x00\x01\x02\x03", "", 3 * time.Second},
		{"A11 HTTP to a raw port", "web", vip(mixed, 9000), get, "mp-mixed:9000 tcp\n" + get, 0},
		{"A11 bytes to an HTTP port", "web", vip(nine, 9000), "\x16\x00hello there, no HTTP\n", "", 3 * time.Second},
		{"A13 server first", "web", vip(first, 9000), "", "mp-tcpfirst:9000 tcp\n", 200 * time.Millisecond},
		{"R5 18082 of a raw service", "web", vip(first, 18082), "x\n", "mp-tcpfirst:9000 tcp\nx\n", 0},
		{"R5 18082 of a mixed service", "web", vip(mixed, 18082), "x\n", "mp-mixed:9000 tcp\nx\n", 0},
		{"R5 18082 with scoped capture", "job", vip(mixed, 18082), "x\n", "mp-mixed:9000 tcp\nx\n", 0},
		{"R5 18082 of an HTTP service, scoped: closed", "job", vip(only, 18082), "x\n", "", 3 * time.Second},
		{"R5 an undeclared port", "web", vip(first, 7001), "x\n", "", 3 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := within(t, patience)
			start := time.Now()
			b := make([]byte, max(1, len(tt.want)))
			n := 0
			c, err := w.Pod(tt.from).Dial(ctx, "tcp", tt.dial)
			if err == nil {
				defer c.Close()
				deadline(ctx, c.(*net.TCPConn))
				if _, err = io.WriteString(c, tt.send); err == nil {
					n, err = io.ReadFull(c, b)
				}
			}
			took := time.Since(start)
			if got := string(b[:n]); got != tt.want {
				t.Errorf("got %q (%v), want %q", got, err, tt.want)
			}
			if tt.want == "" && errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the connection was neither answered nor closed")
			}
			if tt.limit > 0 && took > tt.limit {
				t.Errorf("took %v, must be below %v", took, tt.limit)
			}
		})
	}
}
