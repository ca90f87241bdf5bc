package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/e2e/rig"
)

// The comparison with the design record: one mesh, and in it one client that our proxy captures and
// four that Envoy captures, each by a layout of testdata/capture.yaml. All say the same bytes to
// the same addresses, and what comes back is compared with three things: with what the record
// measured, with Envoy, and with docs/deviations.md.

// workload is one of contract 4.14, or speaker: raw TCP, server first, on a number that nobody declares HTTP (leg A13).
type workload struct {
	Name      string
	Port      string // annotation endpoint.aether.io/port; "": none
	HTTP, TCP []int
	IP        netip.Addr // of its Service
	Pod       *rig.Pod
	Pin       string
}

var workloads = []workload{
	{Name: "mp-httponly", HTTP: []int{8080}},
	{Name: "mp-multi", HTTP: []int{8080, 9090}},
	{Name: "mp-eighty", HTTP: []int{80, 8080, 9090}},
	{Name: "mp-mixed", HTTP: []int{8080}, TCP: []int{9000}},
	{Name: "mp-tcpfirst", Port: "9000", HTTP: []int{8080}, TCP: []int{9000}},
	{Name: "mp-nine", Port: "9000", HTTP: []int{9000}},
	{Name: "speaker", Port: "3306", TCP: []int{3306}},
}

// Names are the spellings of contract 4.5, each with that suffix.
func (l workload) Names(suffix string) (names []string) {
	n := l.Name + "." + namespace
	for _, name := range []string{n + "." + domain, n + ".svc.cluster.local", n + ".svc", n, l.Name} {
		names = append(names, name+suffix)
	}
	return names
}

// Serves tells whether the port is an HTTP port of the service.
func (l workload) Serves(port int) bool { return slices.Contains(l.HTTP, port) }

// All are the ports.
func (l workload) All() []int { return slices.Concat(l.HTTP, l.TCP) }

// layout is a client that Envoy captures.
type layout struct {
	Layout     string
	Pod        *rig.Pod
	Tree       bool
	Skip       int // a port whose connections are not inspected; 0: none
	SkipEnd    int
	Inspectors map[string]string
	Protocols  []string
	HTTPPorts  []int // that have a chain; 0: the chain without a port
	Services   []workload
}

// greeter is the Service whose address a stand-in holds that speaks first.
const greeter = "mp-httponly"

// comparison is the world of the comparison.
type comparison struct {
	*world
	services []workload
	orig     *rig.Pod            // outside the mesh, and whoever has a Service's address
	clients  map[string]*rig.Pod // "ours" and the layouts
}

func newComparison(t *testing.T) *comparison {
	w := newWorld(t)
	c := &comparison{world: w, services: slices.Clone(workloads), clients: map[string]*rig.Pod{"ours": w.a}}
	var err error
	c.orig, err = w.rig.AddPod(w.ctx, 1, "orig")
	must(t, err)
	for i := range c.services {
		l := &c.services[i]
		l.IP, l.Pin = netip.AddrFrom4([4]byte{10, 96, 0, byte(40 + i)}), spiffe(l.Name)
		var ports []uint16
		var decl []string
		for _, p := range l.All() {
			ports = append(ports, uint16(p))
			if l.Serves(p) {
				decl = append(decl, fmt.Sprint(p))
			} else {
				decl = append(decl, fmt.Sprintf("%d=tcp", p))
			}
		}
		m := rig.PodManifest{Ports: strings.Join(decl, ",")}
		if l.Port != "" {
			m.Annotations = map[string]string{"endpoint.aether.io/port": l.Port}
		}
		l.Pod = w.pod(1, l.Name, m)
		w.service(l.Name, l.IP, ports...)
		c.serve(l)
	}
	c.standIn()

	var clients []layout
	for _, l := range []layout{
		{Layout: "l1"},
		{Layout: "l2", HTTPPorts: []int{80, 8080, 9000, 9090, 0}},
		{Layout: "l3", HTTPPorts: []int{80, 8080, 9000, 9090, 0}, Skip: 3306, SkipEnd: 3307},
		{Layout: "tree", Tree: true},
	} {
		l.Pod, err = w.rig.AddPod(w.ctx, 0, l.Layout)
		must(t, err)
		must(t, l.Pod.Capture(w.ctx))
		l.Inspectors = map[string]string{"http": "HttpInspector", "tls": "TlsInspector"}
		l.Protocols = []string{"http/1.0", "http/1.1", "h2c"}
		l.Services = c.services
		c.clients[l.Layout] = l.Pod
		clients = append(clients, l)
	}
	w.proxy(0)
	w.proxy(1)
	w.envoy(0, 9902, "capture.yaml", map[string]any{"Clients": clients, "Services": c.services, "Cert": w.svid("a")})
	return c
}

// serve starts the applications of a workload: each names itself and its port.
func (c *comparison) serve(l *workload) {
	c.Helper()
	for _, port := range l.HTTP {
		stop, err := l.Pod.ServeHTTP(c.ctx, fmt.Sprintf("127.0.0.1:%d", port), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "%s:%d http", l.Name, port)
		}))
		must(c, err)
		c.Cleanup(stop)
	}
	for _, port := range l.TCP {
		serveTCP(c.world, &l.Pod.Space, fmt.Sprintf("127.0.0.1:%d", port), func(conn *net.TCPConn) {
			tagged(conn, fmt.Sprintf("%s:%d tcp", l.Name, port), l.Name == "speaker")
		})
	}
}

// standInPorts are those that the stand-in listens on.
var standInPorts = []int{80, 3306, 5432, 7003, 7777, 8080, 9000, 9090, 18081, 18082}

// standIn makes pod orig the owner of every Service's address, so that what a proxy passes through
// to one is seen to arrive, and where.
func (c *comparison) standIn() {
	c.Helper()
	for _, cmd := range []struct {
		in   *rig.Space
		args []string
	}{
		{&c.rig.Nodes[0].Space, []string{"ip", "route", "add", "10.96.0.0/24", "via", c.rig.Nodes[1].IP4.String()}},
		{&c.rig.Nodes[1].Space, []string{"ip", "route", "add", "10.96.0.0/24", "via", c.orig.IP4.String()}},
		{&c.orig.Space, []string{"ip", "route", "add", "local", "10.96.0.0/24", "dev", "lo"}},
	} {
		out, err := cmd.in.Command(c.ctx, cmd.args...).CombinedOutput()
		if err != nil {
			c.Fatalf("%s: %v: %s", strings.Join(cmd.args, " "), err, out)
		}
	}
	greets := c.service(greeter).IP
	for _, port := range standInPorts {
		serveTCP(c.world, &c.orig.Space, fmt.Sprintf("0.0.0.0:%d", port), func(conn *net.TCPConn) {
			at := unmapped(conn.LocalAddr())
			tag := "passed to " + c.name(at)
			if port == 7003 {
				from := unmapped(conn.RemoteAddr()).Addr()
				tag += " from the pod"
				if !slices.ContainsFunc(c.rig.Pods(), func(p *rig.Pod) bool { return p.IP4 == from }) {
					tag = strings.Replace(tag, "the pod", "the node", 1)
				}
			}
			tagged(conn, tag, port == 5432 || at.Addr() == greets)
		})
	}
}

func unmapped(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// service is the workload of that name.
func (c *comparison) service(name string) *workload {
	i := slices.IndexFunc(c.services, func(l workload) bool { return l.Name == name })
	return &c.services[i]
}

// name is "mp-nine:9000" for the address of a Service, "outside:5432" for another one.
func (c *comparison) name(a netip.AddrPort) string {
	for _, l := range c.services {
		if l.IP == a.Addr() {
			return fmt.Sprintf("%s:%d", l.Name, a.Port())
		}
	}
	return fmt.Sprintf("outside:%d", a.Port())
}

// addr is the reverse of name.
func (c *comparison) addr(name string) string {
	host, port, _ := strings.Cut(name, ":")
	if host == "outside" {
		return c.orig.IP4.String() + ":" + port
	}
	return c.service(host).IP.String() + ":" + port
}

// tagged says who it is, at once or after the first bytes, and then echoes. What looks like a
// request for HTTP is answered so.
func tagged(c *net.TCPConn, tag string, first bool) {
	if first {
		fmt.Fprintln(c, tag)
		io.Copy(c, c)
		return
	}
	b := make([]byte, 4<<10)
	n, err := c.Read(b)
	if err != nil {
		return
	}
	if requestLine.Match(b[:n]) && strings.HasPrefix(tag, "passed to ") {
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(tag), tag)
		return
	}
	fmt.Fprintln(c, tag)
	c.Write(b[:n])
	io.Copy(c, c)
}

var requestLine = regexp.MustCompile(`^[A-Z]+ \S+ HTTP/1`)

// silence is how long a client waits for an answer of any kind.
const silence = 3 * time.Second

// say dials from a client's pod, says the bytes, and tells what came back, as the tables spell it.
func (c *comparison) say(from *rig.Pod, to, bytes string) string {
	ctx, cancel := context.WithTimeout(c.ctx, silence)
	defer cancel()
	start := time.Now()
	conn, err := from.Dial(ctx, "tcp", c.addr(to))
	if err != nil {
		return late(ended(err), start)
	}
	defer conn.Close()
	conn.SetDeadline(start.Add(silence))
	if _, err := io.WriteString(conn, bytes); err != nil {
		return late(ended(err), start)
	}
	r := bufio.NewReader(conn)
	head, err := r.Peek(1)
	if err != nil {
		return late(ended(err), start)
	}
	what := lateBy(start)
	switch head[0] {
	case 0: // the length of a frame
		b, err := r.Peek(9)
		if err != nil || b[3] != 4 {
			return fmt.Sprintf("bytes %x, %v", b, err)
		}
		return "HTTP/2 SETTINGS" + what
	case 'H':
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			return "broken HTTP: " + err.Error()
		}
		body, err := io.ReadAll(res.Body)
		if err != nil {
			return "broken HTTP: " + err.Error()
		}
		return verdict(res, string(body)) + what
	}
	tag, err := r.ReadString('\n')
	if err != nil {
		return fmt.Sprintf("%q, %v", tag, err)
	}
	echo := make([]byte, len(bytes))
	if _, err := io.ReadFull(r, echo); err != nil || string(echo) != bytes {
		return fmt.Sprintf("%s, but of %q it got %q (%v)", strings.TrimSpace(tag), bytes, echo, err)
	}
	return strings.TrimSpace(tag) + what
}

// verdict is "200 mp-nine:9000 http", "421 port-mismatch", "404".
func verdict(res *http.Response, body string) string {
	if why := res.Header.Get("X-Aether-Error"); why != "" {
		body = why
	} else if res.StatusCode != 200 {
		body = ""
	}
	if s := res.Header.Get("Grpc-Status"); s != "" {
		body += " grpc-status " + s
	}
	return strings.TrimSpace(fmt.Sprintf("%d %s", res.StatusCode, body))
}

// late adds lateBy.
func late(what string, start time.Time) string { return what + lateBy(start) }

// lateBy is "" for what came at once and ", after 1 s" for what waited for the inspection's end. There is
// nothing between that these proxies wait for.
func lateBy(start time.Time) string {
	if took := time.Since(start); took >= 900*time.Millisecond {
		return fmt.Sprintf(", after %d s", int((took + 100*time.Millisecond).Seconds()))
	}
	return ""
}

// ended tells how a connection ended without a byte.
func ended(err error) string {
	var late net.Error
	if errors.As(err, &late) && late.Timeout() {
		return "silence"
	}
	return "closed"
}

// request is a request without a body.
func request(host string, lines ...string) string {
	line := "GET / HTTP/1.1"
	if len(lines) > 0 && strings.Contains(lines[0], " HTTP/") {
		line, lines = lines[0], lines[1:]
	}
	if host != "" {
		lines = append([]string{"Host: " + host}, lines...)
	}
	return line + "\r\n" + strings.Join(append(lines, "", ""), "\r\n")
}

// hello is a real ClientHello for that name.
func hello(t testing.TB, name string) string {
	t.Helper()
	client, server := net.Pipe()
	defer server.Close()
	go func() {
		defer client.Close()
		tls.Client(client, &tls.Config{ServerName: name, NextProtos: []string{"h2", "http/1.1"}}).Handshake()
	}()
	b := make([]byte, 16<<10)
	n, err := server.Read(b)
	must(t, err)
	return string(b[:n])
}

const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// row is a connection of the record's tables L1 to L3, or of one that docs/deviations.md speaks of.
type row struct {
	name   string
	to     string
	bytes  string
	record string // what the record says it measured; "": not in its tables
	l1, l2 string // Envoy in that layout; "": not asked
	l3     string
	tree   string // Envoy as it is shipped
	ours   string // "": as tree
	why    string // the row of docs/deviations.md or page of docs/decisions that says so, if ours is another answer
}

// TestRecord compares ours with Envoy in the record's layouts, in one mesh.
func TestRecord(t *testing.T) {
	c := newComparison(t)
	t.Run("legs", func(t *testing.T) { testLegs(t, c) })
	t.Run("tables", func(t *testing.T) { testTables(t, c) })
}

// testLegs runs the captured legs of contract 4.14 through ours and through Envoy as the record describes it,
// per port (chart 3.0.0) and by the tree (3.0.2): A1, A2, A5, A7, A9, A10, R1 to R4. In each, by HTTP/1.1 and h2c.
func testLegs(t *testing.T, c *comparison) {
	type asked struct {
		leg, to, host, want string
		tree                bool // not in the per-port layout, which had another table for 18081
	}
	var all []asked
	for _, l := range c.services {
		if len(l.HTTP) == 0 {
			continue
		}
		at := func(port int) string {
			return fmt.Sprintf("%s:%d", l.Name, port)
		}
		add := func(leg string, dial int, suffix, want string) {
			for i, host := range l.Names(suffix) {
				leg := leg
				if leg == "A1" && i > 0 {
					leg = "A2"
				}
				all = append(all, asked{leg, at(dial), host, want, dial == 18081})
			}
		}
		eighty := l.Serves(80)
		for _, p := range l.HTTP {
			fine := fmt.Sprintf("200 %s:%d http", l.Name, p)
			leg, portless := "A1", "A9"
			if l.Name == "mp-nine" {
				leg = "A10"
			}
			if p == 80 {
				portless = "R1"
			}
			add(leg, p, fmt.Sprintf(":%d", p), fine)
			add(portless, p, "", fine)
			add("proxy port dialled", 18081, fmt.Sprintf(":%d", p), fine)
			for _, q := range []int{80, 7777, 8080, 9000, 9090, 18081} {
				if q != p {
					add("A5", p, fmt.Sprintf(":%d", q), "421 port-mismatch")
				}
			}
		}
		for _, p := range l.TCP {
			add("A6", 18081, fmt.Sprintf(":%d", p), "421 port-not-http")
		}
		add("A7", 7777, ":7777", "421 port-not-declared")
		add("A7", 18081, ":7777", "421 port-not-declared")
		add("R4", 18081, ":18081", "421 port-not-declared")
		if eighty {
			add("R1", 18081, "", "200 mp-eighty:80 http")
		} else {
			add("R2", 80, "", "421 port-not-declared")
			add("R3", 18081, "", "421 port-required")
		}
	}
	count := map[string]int{}
	for _, by := range []string{"ours", "tree", "l2"} {
		for _, h2c := range []bool{false, true} {
			clients := map[string]*client{} // connections are used again
			for _, a := range all {
				if by == "l2" && a.tree {
					continue
				}
				cl := clients[a.to]
				if cl == nil {
					cl = c.client(c.clients[by], c.addr(a.to), h2c)
					cl.Timeout = time.Second // the time of every leg
					clients[a.to] = cl
				}
				res, body, err := cl.do("GET", a.host, "/", nil)
				if err != nil {
					t.Errorf("%s, %s, h2c %v: dial %s, Host %s: %v", a.leg, by, h2c, a.to, a.host, err)
				} else if got := verdict(res, body); got != a.want {
					t.Errorf("%s, %s, h2c %v: dial %s, Host %s: got %s, want %s", a.leg, by, h2c, a.to, a.host, got, a.want)
				}
				count[a.leg]++
			}
			for _, cl := range clients {
				cl.t.CloseIdleConnections()
			}
		}
	}
	t.Logf("requests a leg: %v", count)
	for _, leg := range []string{"A1", "A2", "A5", "A6", "A7", "A9", "A10", "R1", "R2", "R3", "R4"} {
		if count[leg] == 0 {
			t.Errorf("leg %s was not run", leg)
		}
	}
}

// testTables runs the tables L1 to L3 of the record, and with them legs A11 and A13, through Envoy's layouts and ours.
// Every answer must be the one that stands here, and every difference of ours to Envoy as it is shipped must name where it is written down.
func testTables(t *testing.T, c *comparison) {
	mesh := func(service, suffix string) string { return c.service(service).Names(suffix)[0] }
	const (
		first    = "protocols where the server speaks first"
		bytes    = "classification of the first bytes"
		original = "passed to mp-multi:8080"
	)
	rows := []row{
		{"HTTP to an HTTP port", "mp-multi:8080", request(mesh("mp-multi", "")), "L1 the HCM, L2 table 8080; 1 ms",
			"200 mp-multi:8080 http", "200 mp-multi:8080 http", "200 mp-multi:8080 http", "200 mp-multi:8080 http", "", ""},
		{"HTTP to an HTTP port, its port in Host", "mp-multi:8080", request(mesh("mp-multi", ":8080")), "L2 table 8080; 1 ms",
			"200 mp-multi:8080 http", "200 mp-multi:8080 http", "200 mp-multi:8080 http", "200 mp-multi:8080 http", "", ""},
		{"HTTP to an HTTP port whose number another service declares raw", "mp-nine:9000", request(mesh("mp-nine", "")), "L1 the passthrough, L2 table 9000; 1 ms",
			"200 passed to mp-nine:9000", "200 mp-nine:9000 http", "200 mp-nine:9000 http", "200 mp-nine:9000 http", "", ""},
		{"HTTP to an HTTP port, another number in Host", "mp-multi:8080", request(mesh("mp-multi", ":9000")), "L2 the table's 421; 1 ms",
			"", "421 port-mismatch", "421 port-mismatch", "421 port-mismatch", "", ""},
		{"bytes to a raw-TCP port", "mp-mixed:9000", "\x00some bytes\n", "L1, L2 the TCP chain; 2 ms",
			"mp-mixed:9000 tcp", "mp-mixed:9000 tcp", "mp-mixed:9000 tcp", "mp-mixed:9000 tcp", "", ""},
		{"HTTP to a raw-TCP port", "mp-mixed:9000", request(mesh("mp-mixed", ":9000")), "L1, L2 the TCP chain; 2 ms",
			"mp-mixed:9000 tcp", "mp-mixed:9000 tcp", "mp-mixed:9000 tcp", "mp-mixed:9000 tcp", "", ""},
		{"bytes to an HTTP port", "mp-nine:9000", "\x00some bytes\n", "L2 the passthrough; 2 ms",
			"passed to mp-nine:9000", "passed to mp-nine:9000", "passed to mp-nine:9000", "passed to mp-nine:9000", "", ""},
		{"HTTP to an undeclared port", "mp-multi:7777", request(mesh("mp-multi", "")), "L2 the port-less HCM; 1 ms",
			"", "421 port-not-declared", "421 port-not-declared", "421 port-not-declared", "", ""},
		{"bytes to an undeclared port", "mp-multi:7777", "\x00some bytes\n", "",
			"passed to mp-multi:7777", "passed to mp-multi:7777", "passed to mp-multi:7777", "passed to mp-multi:7777", "", ""},
		{"h2c to an HTTP port", "mp-multi:8080", preface, "L2 HTTP/2 SETTINGS; 1 ms",
			"HTTP/2 SETTINGS", "HTTP/2 SETTINGS", "HTTP/2 SETTINGS", "HTTP/2 SETTINGS", "", ""},
		{"a ClientHello to an HTTP port", "mp-multi:8080", hello(t, mesh("mp-multi", "")), "L2 the passthrough",
			original, original, original, original, "", ""},
		{"a request line without a version to an HTTP port", "mp-multi:8080", "GET mykey\r\n", "L2 the passthrough; 1 ms",
			original, original, original, original, "400", "042-what-begins-like-a-request.md"},
		{"server first on a raw-TCP port", "speaker:3306", "", "today and per port 1.00 s, with the inspectors off 1 ms",
			"speaker:3306 tcp, after 1 s", "speaker:3306 tcp, after 1 s", "speaker:3306 tcp", "speaker:3306 tcp, after 1 s", "speaker:3306 tcp", first},
		{"server first outside the mesh", "outside:5432", "", "all 1.00 s",
			"passed to outside:5432, after 1 s", "passed to outside:5432, after 1 s", "passed to outside:5432, after 1 s", "passed to outside:5432, after 1 s", "passed to outside:5432", first},
		{"4 bytes to a raw-TCP port", "mp-mixed:9000", "QUIT", "today 1.00 s",
			"mp-mixed:9000 tcp, after 1 s", "mp-mixed:9000 tcp, after 1 s", "mp-mixed:9000 tcp, after 1 s", "mp-mixed:9000 tcp, after 1 s", "mp-mixed:9000 tcp", first},
		{"silence on an HTTP port", greeter + ":8080", "", "per port 1.00 s, then the passthrough",
			"passed to mp-httponly:8080, after 1 s", "passed to mp-httponly:8080, after 1 s", "passed to mp-httponly:8080, after 1 s", "passed to mp-httponly:8080, after 1 s", "silence, after 3 s", "002-silence-is-not-passthrough.md"},
		// Not in the record's tables: other short and long first writes.
		{"4 letters outside the mesh", "outside:7777", "QUIT", "", "", "", "", "passed to outside:7777, after 1 s", "", ""},
		{"4 bytes, not letters, outside the mesh", "outside:7777", "\x00\x01\x02\x03", "", "", "", "", "passed to outside:7777, after 1 s", "passed to outside:7777", bytes},
		{"a short line outside the mesh", "outside:7777", "HI\r\n", "", "", "", "", "passed to outside:7777, after 1 s", "passed to outside:7777", bytes},
		{"the beginning of a ClientHello outside the mesh", "outside:7777", hello(t, "x")[:20], "", "", "", "", "passed to outside:7777, after 1 s", "", ""},
		{"20 KiB without a protocol outside the mesh", "outside:7777", strings.Repeat("\xff", 20<<10), "", "", "", "", "passed to outside:7777", "", ""},
		{"20 KiB of letters outside the mesh", "outside:7777", strings.Repeat("A", 20<<10), "", "", "", "", "passed to outside:7777, after 1 s", "passed to outside:7777", bytes},
		// And what docs/deviations.md says of names and versions.
		{"whom a foreign server sees", "outside:7003", "\x00some bytes\n", "",
			"", "", "", "passed to outside:7003 from the node", "passed to outside:7003 from the pod", "source address of what passes through"},
		{"HTTP for a foreign name", "outside:8080", request("foreign.example"), "", "", "", "", "200 passed to outside:8080", "", ""},
		{"HTTP/1.0", "mp-multi:8080", request(mesh("mp-multi", ""), "GET / HTTP/1.0"), "", "", "", "", "426", "200 mp-multi:8080 http", "HTTP/1.0"},
		{"a trailing dot", "mp-multi:8080", request(mesh("mp-multi", ".")), "", "", "", "", "200 " + original, "200 mp-multi:8080 http", "trailing dot in Host"},
		{"capital letters", "mp-multi:8080", request(strings.ToUpper(mesh("mp-multi", ":8080"))), "", "", "", "", "200 mp-multi:8080 http", "", ""},
		{"two ports in Host", "mp-multi:8080", request(mesh("mp-multi", ":8080:8080")), "", "", "", "", "421 port-mismatch", "400", "Host with `user@`, spaces, a bad port"},
		{"no Host", "mp-multi:8080", request(""), "", "", "", "", "400", "", ""},
		{"CONNECT", "mp-multi:8080", request(mesh("mp-multi", ":8080"), "CONNECT "+mesh("mp-multi", ":8080")+" HTTP/1.1"), "", "", "", "", "404", "", ""},
		{"a refused gRPC request", "mp-multi:8080", request(mesh("mp-multi", ":9090"), "POST /a.B/C HTTP/1.1", "Content-Type: application/grpc", "Content-Length: 0"), "", "", "", "", "200 port-mismatch grpc-status 2", "", ""},
	}

	documented := deviations(t)
	type answer struct{ by, want, got string }
	answers := make([][]answer, len(rows))
	var out strings.Builder
	var all sync.WaitGroup
	few := make(chan struct{}, 12) // most of the time is waiting
	for i := range rows {
		r := &rows[i]
		if r.ours == "" {
			r.ours = r.tree
		}
		fmt.Fprintf(&out, "%-62s %-40s %s\n", r.name, r.tree, r.ours)
		for _, a := range []answer{{by: "l1", want: r.l1}, {by: "l2", want: r.l2}, {by: "l3", want: r.l3}, {by: "tree", want: r.tree}, {by: "ours", want: r.ours}} {
			if a.want != "" {
				answers[i] = append(answers[i], a)
			}
		}
		for k := range answers[i] {
			few <- struct{}{}
			all.Go(func() {
				a := &answers[i][k]
				a.got = c.measure(a.by, r, a.want)
				<-few
			})
		}
	}
	all.Wait()
	for i, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			for _, a := range answers[i] {
				if a.got != a.want {
					t.Errorf("%s: got %q, want %q (the record: %s)", a.by, a.got, a.want, r.record)
				}
			}
			switch {
			case r.ours != r.tree && !documented[r.why]:
				t.Errorf("ours answers %q and Envoy %q, and neither docs/deviations.md has a row nor docs/decisions a page %q", r.ours, r.tree, r.why)
			case r.ours == r.tree && r.why != "":
				t.Errorf("the difference of %q is none any more", r.why)
			}
		})
	}
	t.Logf("Envoy %s as shipped, and ours:\n%s", rig.EnvoyVersion, &out)
}

// measure asks a client's proxy, again if the answer came late: a wait that is the proxy's is there every time, one
// of the machine's is not.
func (c *comparison) measure(by string, r *row, want string) (got string) {
	for range 3 {
		if got = c.say(c.clients[by], r.to, r.bytes); got == want || !strings.Contains(got, ", after") {
			break
		}
	}
	return got
}

// deviations are the first cells of the tables of docs/deviations.md, and the pages of docs/decisions.
func deviations(t *testing.T) map[string]bool {
	t.Helper()
	b, err := os.ReadFile("../../docs/deviations.md")
	must(t, err)
	rows := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\| (.+?) \|`).FindAllStringSubmatch(string(b), -1) {
		rows[m[1]] = true
	}
	pages, err := os.ReadDir("../../docs/decisions")
	must(t, err)
	for _, p := range pages {
		rows[p.Name()] = true
	}
	return rows
}
