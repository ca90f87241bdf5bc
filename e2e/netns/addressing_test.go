package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
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

func (l *leg) mesh() string { return l.names("")[0] }

// names are the spellings of contract 4.5, each with that suffix: the mesh's, three of Kubernetes, the short one.
func (l *leg) names(suffix string) []string {
	n := l.name + ".shop"
	return []string{n + ".aether.internal" + suffix, n + ".svc.cluster.local" + suffix, n + ".svc" + suffix, n + suffix, l.name + suffix}
}

// family is the names that the record's legs dial: the mesh's and the two of "both name families".
func (l *leg) family(suffix string) []string {
	n := l.names(suffix)
	return []string{n[0], n[1], n[3]}
}

// list is how a refusal's body tells the port: its number and its class.
func (l *leg) list() (all []string) {
	for _, p := range l.http {
		all = append(all, fmt.Sprintf("%d (http", p))
	}
	for _, p := range l.tcp {
		all = append(all, fmt.Sprintf("%d (tcp", p))
	}
	return all
}

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
	from, dial, host, path string
	want                   string   // "200 mp-nine:9000 http", "421 port-mismatch"
	body                   []string // must be in the body, too
}

func (a asked) run(t *testing.T, limit time.Duration) {
	t.Run(fmt.Sprintf("%s %s host %s", a.from, a.dial, a.host), func(t *testing.T) {
		res, err := send(within(t, limit), transport(t, false, w.Pod(a.from), a.dial), "GET", a.host, "/"+a.path, nil)
		if err != nil {
			t.Fatalf("%v; want %s within %v", err, a.want, limit)
		}
		if got := outcome(res); got != a.want {
			t.Errorf("got  %s (%s)\nwant %s", got, res.body, a.want)
		}
		for _, part := range a.body {
			if !strings.Contains(res.body, part) {
				t.Errorf("body %q does not tell %q", res.body, part)
			}
		}
	})
}

// outcome is "200 <body>", "421 <reason>" or a bare status.
func outcome(a *answer) string {
	switch why := a.Header.Get("X-Aether-Error"); {
	case why != "":
		return fmt.Sprint(a.StatusCode, " ", why)
	case a.StatusCode == 200:
		return "200 " + strings.TrimSpace(a.body)
	}
	return fmt.Sprint(a.StatusCode)
}

// way is how a client comes to the proxy port: by loopback of either family, captured or not, or by
// dialling 18081 of any address, which is captured with and without redirect-all.
type way struct{ from, dial string }

func proxyPorts(n uint8) []way {
	return []way{
		{"job", proxyPort}, {"job", "[::1]:18081"}, {"web", proxyPort}, {"web", "[::1]:18081"},
		{"job", vip(n, 18081)}, {"web", vip(n, 18081)}, {"web", vip6(n, 18081)},
	}
}

func vip6(n uint8, port int) string {
	return netip.AddrPortFrom(w.ClusterIPs(n)[1], uint16(port)).String()
}

// TestLegs are the addressing legs of contract 4.14 that are HTTP, each under the time that the record gives it, and
// in the record's words what must answer. A4 and the raw ones have tests of their own.
func TestLegs(t *testing.T) {
	const soon = time.Second // of A6, A7, R2, R3; the other refusals are no slower
	type cells struct {
		limit time.Duration
		all   []asked
	}
	table := map[string]*cells{
		"A1": {limit: patience}, "A2": {limit: patience}, "A3": {limit: patience}, "A9": {limit: patience}, "A10": {limit: patience}, "R1": {limit: patience},
		"A5": {limit: soon}, "A6": {limit: soon}, "A7": {limit: soon}, "R2": {limit: soon}, "R3": {limit: soon}, "R4": {limit: soon},
	}
	add := func(leg string, a asked) { table[leg].all = append(table[leg].all, a) }
	for i := range legs {
		l, n := &legs[i], uint8(firstVIP+i)
		captured := func(leg string, port int, hosts []string, want string, body ...string) {
			for _, host := range hosts {
				add(leg, asked{from: "web", dial: vip(n, port), host: host, want: want, body: body})
				add(leg, asked{from: "web", dial: vip6(n, port), host: host, want: want, body: body})
			}
		}
		byProxyPort := func(leg string, hosts []string, want string, body ...string) {
			for _, way := range proxyPorts(n) {
				for _, host := range hosts {
					add(leg, asked{from: way.from, dial: way.dial, host: host, want: want, body: body})
				}
			}
		}
		for _, p := range l.http {
			want, suffix := fmt.Sprintf("200 %s:%d http", l.name, p), fmt.Sprintf(":%d", p)
			captured("A1", p, []string{l.mesh() + suffix}, want)
			captured("A2", p, l.names(suffix)[1:], want)
			byProxyPort("A3", l.family(suffix), want)
			if p != 80 {
				captured("A9", p, l.family(""), want)
			}
			for _, other := range l.http {
				if other != p {
					captured("A5", p, l.family(fmt.Sprintf(":%d", other)), "421 port-mismatch", l.list()...)
				}
			}
		}
		for _, p := range l.tcp {
			byProxyPort("A6", l.family(fmt.Sprintf(":%d", p)), "421 port-not-http", l.list()...)
		}
		captured("A7", 7777, l.family(":7777"), "421 port-not-declared", l.list()...)
		byProxyPort("A7", l.family(":7777"), "421 port-not-declared", l.list()...)
		if l.name == "mp-eighty" {
			captured("R1", 80, l.family(""), "200 mp-eighty:80 http")
			byProxyPort("R1", l.family(""), "200 mp-eighty:80 http")
		} else {
			captured("R2", 80, l.family(""), "421 port-not-declared", l.list()...)
			byProxyPort("R3", l.family(""), "421 port-required", l.list()...)
		}
		byProxyPort("R4", l.family(":18081"), "421 port-not-declared")
		if l.name == "mp-nine" { // mp-mixed and mp-tcpfirst declare 9000 raw
			captured("A10", 9000, l.names(":9000"), "200 mp-nine:9000 http")
			captured("A10", 9000, l.names(""), "200 mp-nine:9000 http")
			byProxyPort("A10", l.names(":9000"), "200 mp-nine:9000 http")
		}
	}
	for _, leg := range slices.Sorted(maps.Keys(table)) {
		c := table[leg]
		t.Run(leg, func(t *testing.T) {
			t.Logf("%d requests", len(c.all))
			for _, a := range c.all {
				a.run(t, c.limit)
			}
		})
	}
}

// TestFloor is what contract 4.3(b), 4.5 and 4.11 say of names that are none, or none for this caller.
func TestFloor(t *testing.T) {
	multi, _ := legNamed("mp-multi")
	for _, a := range []asked{
		{from: "job", dial: proxyPort, host: "elsewhere.example", want: "404"},
		{from: "web", dial: proxyPort, host: "elsewhere.example:8080", want: "404"},
		{from: "job", dial: proxyPort, host: "nobody.shop.aether.internal:8080", want: "404"},
		{from: "job", dial: proxyPort, host: "nobody.shop.aether.internal:18081", want: "421 port-not-declared"},
		{from: "job", dial: proxyPort, host: "nobody.shop.aether.internal:18082", want: "421 port-not-declared"},
		// 18081 dialled: redirect-all passes a foreign name to the dialled address, where nobody is; scoped capture has no such way.
		{from: "web", dial: vip(multi, 18081), host: "elsewhere.example", want: "503"},
		{from: "job", dial: vip(multi, 18081), host: "elsewhere.example", want: "404"},
		{from: "job", dial: proxyPort, host: "MP-Multi.Shop.AETHER.internal:8080", want: "200 mp-multi:8080 http"},
		{from: "web", dial: vip(multi, 8080), host: "mp-multi.shop.svc.cluster.local.:8080", want: "200 mp-multi:8080 http"},
		{from: "web", dial: vip(multi, 8080), host: "mp-multi.shop.aether.internal:8080:8080", want: "400"},
		// A short name is one of the caller's namespace, on both paths.
		{from: "ops", dial: proxyPort, host: "mp-multi:8080", want: "404"},
		{from: "ops", dial: vip(multi, 8080), host: "mp-multi", want: "503"},
		{from: "ops", dial: proxyPort, host: "mp-multi.shop:8080", want: "200 mp-multi:8080 http"},
		{from: "ops", dial: vip(multi, 8080), host: "mp-multi.shop.svc", want: "200 mp-multi:8080 http"},
		{from: "job", dial: proxyPort, host: "anything.example", path: "aether/readyz", want: "200 ready"},
		{from: "web", dial: vip(multi, 8080), host: "mp-multi", path: "aether/readyz", want: "200 ready"},
	} {
		a.run(t, time.Second)
	}
}

// addressing is the rule of contract 4.3 in its own words: the answer to a Host with that port (0: none)
// on a dial to that port, or on the proxy port if the dialled one is 18081.
func addressing(l *leg, dialled, port int) string {
	reached := func(p int) string { return fmt.Sprintf("200 %s:%d http", l.name, p) }
	if dialled != 18081 {
		switch {
		case !slices.Contains(l.http, dialled):
			return "421 port-not-declared"
		case port == 0 || port == dialled:
			return reached(dialled)
		}
		return "421 port-mismatch"
	}
	switch {
	case port == 0 && slices.Contains(l.http, 80):
		return reached(80)
	case port == 0:
		return "421 port-required"
	case slices.Contains(l.http, port):
		return reached(port)
	case slices.Contains(l.tcp, port):
		return "421 port-not-http"
	}
	return "421 port-not-declared"
}

// TestAddressingRule asks every cell of the rule: every name of every workload with every port, dialled at every port that
// is not raw where it is dialled, by both families, HTTP/1.1 and h2c, and by every way to the proxy port.
func TestAddressingRule(t *testing.T) {
	t.Parallel()
	const nine = "mp-nine"
	at9000, _ := legNamed(nine)
	multi, _ := legNamed("mp-multi")
	type entry struct {
		way
		port int // dialled
		h2   bool
	}
	var entries []entry
	for _, h2 := range []bool{false, true} {
		for _, port := range []int{80, 8080, 9090, 9000, 7777} {
			n := multi // the address says nothing: a service of another name has it
			if port == 9000 {
				n = at9000
			}
			entries = append(entries, entry{way{"web", vip(n, port)}, port, h2}, entry{way{"web", vip6(n, port)}, port, h2})
		}
		for _, w := range proxyPorts(multi) {
			entries = append(entries, entry{w, 18081, h2})
		}
	}
	var requests atomic.Int64
	t.Cleanup(func() { t.Logf("%d requests", requests.Load()) })
	for _, e := range entries {
		t.Run(fmt.Sprintf("%s %s h2c %v", e.from, e.dial, e.h2), func(t *testing.T) {
			t.Parallel()
			ctx := within(t, 3*patience)
			rt := transport(t, e.h2, w.Pod(e.from), e.dial)
			for i := range legs {
				l := &legs[i]
				for _, port := range []int{0, 80, 8080, 9090, 9000, 7777, 18081, 18082} {
					want, suffix := addressing(l, e.port, port), ""
					if port != 0 {
						suffix = fmt.Sprintf(":%d", port)
					}
					for _, host := range append(l.names(suffix), strings.ToUpper(l.mesh()+suffix), l.mesh()+"."+suffix) {
						a, err := send(ctx, rt, "GET", host, "/", nil)
						if err != nil {
							t.Fatalf("host %s: %v", host, err)
						}
						if got := outcome(a); got != want {
							t.Errorf("host %s: got %s, want %s", host, got, want)
						}
						requests.Add(1)
					}
				}
			}
		})
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
	for _, p := range l.http {
		all := []way{{"web", vip(n, p)}, {"web", vip6(n, p)}}
		for _, by := range append(all, proxyPorts(n)...) {
			for _, host := range l.names(fmt.Sprintf(":%d", p)) {
				a := mustSend(t, ctx, transport(t, false, w.Pod(by.from), by.dial), "GET", host, "/", nil)
				if want := fmt.Sprintf("200 mp-multi:%d http", p); outcome(a) != want || a.Header.Get("X-Leg") != "a4" {
					t.Errorf("%s from %s by %s: %s, x-leg %q, want %s with the route's field", host, by.from, by.dial, outcome(a), a.Header.Get("X-Leg"), want)
				}
			}
		}
	}
	// It is that service's, and no filter of a service runs on a refusal (contract 4.4).
	for _, tt := range []struct{ dial, host string }{
		{vip(n, 8080), "mp-eighty"}, {vip(n, 8080), "mp-multi:9090"}, {vip(n, 7777), "mp-multi"},
	} {
		if a := mustSend(t, ctx, transport(t, false, w.Pod("web"), tt.dial), "GET", tt.host, "/", nil); a.Header.Get("X-Leg") != "" {
			t.Errorf("%s by %s: %s bears the field of mp-multi's route", tt.host, tt.dial, outcome(a))
		}
	}
}

// TestLegsRaw are the legs that are not HTTP: A8, A11, A13, R5. None waits for the sniffing time-out, but where bytes
// go on to an address that nobody has, whose refusal is the network's own.
func TestLegsRaw(t *testing.T) {
	mixed, _ := legNamed("mp-mixed")
	first, _ := legNamed("mp-tcpfirst")
	nine, _ := legNamed("mp-nine")
	only, _ := legNamed("mp-httponly")
	const (
		get    = "GET / HTTP/1.1\r\nHost: mp-mixed.shop.aether.internal:9000\r\n\r\n"
		nobody = "" // no application answers
		quick  = 200 * time.Millisecond
		end    = 3 * time.Second
	)
	type raw struct {
		name, from, dial, send, want string
		limit                        time.Duration
	}
	all := []raw{
		{"A11 HTTP to a raw port", "web", vip(mixed, 9000), get, "mp-mixed:9000 tcp\n" + get, patience},
		{"A11 HTTP to a raw port by IPv6", "web", vip6(mixed, 9000), get, "mp-mixed:9000 tcp\n" + get, patience},
		{"A11 HTTP to a declared raw port", "web", vip(first, 9000), get, "mp-tcpfirst:9000 tcp\n" + get, patience},
		{"A11 h2c to a raw port", "web", vip(mixed, 9000), h2preface, "mp-mixed:9000 tcp\n" + h2preface, patience},
		{"A11 bytes to an HTTP port", "web", vip(nine, 9000), "\x16\x00hello there, no HTTP\n", nobody, end},
		{"A11 bytes to an HTTP port by IPv6", "web", vip6(nine, 9000), "\x00\x01\x02\x03\x04\x05\x06", nobody, end},
		{"A13 server first", "web", vip(appVIP, portBanner), "", "banner\n", quick}, // a number that nobody declares HTTP
		{"A13 server first by IPv6", "web", vip6(appVIP, portBanner), "", "banner\n", quick},
		{"A13 server first, HTTP elsewhere", "web", vip(first, 9000), "", "mp-tcpfirst:9000 tcp\n", quick}, // mp-nine's is HTTP
		{"R5 18082 of a raw service", "web", vip(first, 18082), "x\n", "mp-tcpfirst:9000 tcp\nx\n", patience},
		{"R5 18082 of a raw service by IPv6", "web", vip6(first, 18082), "x\n", "mp-tcpfirst:9000 tcp\nx\n", patience},
		{"R5 18082 of a raw service, scoped", "job", vip(first, 18082), "x\n", "mp-tcpfirst:9000 tcp\nx\n", patience},
		{"R5 18082 of a mixed service", "web", vip(mixed, 18082), "x\n", "mp-mixed:9000 tcp\nx\n", patience},
		{"R5 18082 of a mixed service, scoped", "job", vip(mixed, 18082), "x\n", "mp-mixed:9000 tcp\nx\n", patience},
		{"R5 18082, server first", "web", vip(first, 18082), "", "mp-tcpfirst:9000 tcp\n", quick},
		{"R5 18082 of an HTTP service", "web", vip(only, 18082), "x\n", nobody, end},
		{"R5 18082 of an HTTP service, scoped: closed", "job", vip(only, 18082), "x\n", nobody, time.Second},
		{"R5 an undeclared port", "web", vip(first, 7001), "x\n", nobody, end},
	}
	for i, l := range legs { // the record asks mp-mixed
		all = append(all,
			raw{"A8 bytes to an undeclared port of " + l.name, "web", vip(uint8(firstVIP+i), 7777), "\x00\x01\x02\x03", nobody, end},
			raw{"A8 text to an undeclared port of " + l.name, "web", vip6(uint8(firstVIP+i), 7777), "ping\n", nobody, end})
	}
	for _, tt := range all {
		t.Run(tt.name, func(t *testing.T) {
			ctx := within(t, tt.limit)
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
			if got := string(b[:n]); got != tt.want {
				t.Errorf("got %q (%v), want %q within %v", got, err, tt.want, tt.limit)
			}
			if tt.want == nobody && (errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)) {
				t.Errorf("the connection was neither answered nor closed within %v", tt.limit)
			}
		})
	}
}

const h2preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
