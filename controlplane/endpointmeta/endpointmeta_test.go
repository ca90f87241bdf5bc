package endpointmeta

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"aether/dataplane/model"
)

// show prints what a case asserts: the ports, then whatever is not a default.
func show(m Meta) string {
	var s []string
	for _, p := range m.Ports {
		class := map[model.Class]string{model.HTTP: "h1", model.TCP: "tcp", model.UDP: "udp"}[p.Class]
		if p.Class == model.HTTP && p.App == model.AppH2C {
			class = "h2"
		}
		if p.AlsoUDP {
			class += "+udp"
		}
		s = append(s, fmt.Sprintf("%d=%s", p.Number, class))
	}
	add := func(differs bool, format string, args ...any) {
		if differs {
			s = append(s, fmt.Sprintf(format, args...))
		}
	}
	add(m.DefaultPort != 8080, "port:%d", m.DefaultPort)
	add(m.Weight != 1024, "weight:%d", m.Weight)
	add(m.HealthPath != "/", "health:%s", m.HealthPath)
	add(m.HealthCheck != HealthEDS, "active")
	add(m.UDSSocket != "", "uds:%s", m.UDSSocket)
	add(m.Metadata != nil, "%v", m.Metadata)
	add(m.Upstreams != nil, "up:%v", m.Upstreams)
	add(m.SPIFFEID != "", "%s", m.SPIFFEID)
	for _, n := range m.Notes {
		s = append(s, "note "+n.Key)
	}
	return strings.Join(s, " ")
}

// TestParse has at least one case for each row of the table of contract 1.3,
// each production of the grammar, 1.4, and aether.io/spiffe-id. A case is
// "key=value|key=value" with the prefix endpoint.aether.io/ left out of keys
// that have no dot.
func TestParse(t *testing.T) {
	for _, tt := range []struct{ ann, want string }{
		// endpoint.aether.io/port
		{"", "8080=h1"},
		{"port:9090", "9090=h1 port:9090"},
		{"port:0", "0=h1 port:0"},
		{"port:65535", "65535=h1 port:65535"},
		{"port:65536", `! endpoint.aether.io/port: "65536" is too large`},
		{"port:-1", `! endpoint.aether.io/port: "-1" is not a number`},
		{"port:http", `! endpoint.aether.io/port: "http" is not a number`},
		{"port: 8080", `! endpoint.aether.io/port: " 8080" is not a number`},
		{"port:0x50", `! endpoint.aether.io/port: "0x50" is not a number`},
		{"port:", `! endpoint.aether.io/port: no number`},
		{"port:18081", `! endpoint.aether.io/port: port 18081 is reserved`},
		{"port:18001", `! endpoint.aether.io/port: port 18001 is reserved`},
		{"port:18008", `! endpoint.aether.io/port: port 18008 is reserved`},
		{"port:18082", `! endpoint.aether.io/port: port 18082 is reserved`},
		{"port:18080", "18080=h1 port:18080"},
		{"port:18083", "18083=h1 port:18083"},

		// endpoint.aether.io/protocol
		{"protocol:http", "8080=h1"},
		{"protocol:tcp", "8080=tcp"},
		{"protocol:tcp|port:5432", "5432=tcp port:5432"},
		{"protocol:TCP", `! endpoint.aether.io/protocol: unknown protocol "TCP"`},
		{"protocol:udp", `! endpoint.aether.io/protocol: unknown protocol "udp"`},
		{"protocol:grpc", `! endpoint.aether.io/protocol: unknown protocol "grpc"`},
		{"protocol:", `! endpoint.aether.io/protocol: unknown protocol ""`},

		// endpoint.aether.io/ports: the grammar
		{"ports:", "8080=h1"},
		{"ports: , ,", "8080=h1"},
		{"ports:9090", "8080=h1 9090=h1"},
		{"ports:9090,7070,9090", "7070=h1 8080=h1 9090=h1"},
		{"ports:9090=h1", "8080=h1 9090=h1"},
		{"ports:9090=http1", "8080=h1 9090=h1"},
		{"ports:9090=http/1.1", "8080=h1 9090=h1"},
		{"ports:9090=h2", "8080=h1 9090=h2"},
		{"ports:9090=http2", "8080=h1 9090=h2"},
		{"ports:9090=tcp", "8080=h1 9090=tcp"},
		{"ports:9090=udp", "8080=h1 9090=udp"},
		{"ports:9090=HTTP/1.1,9091=H2,9092=TCP,9093=Udp", "8080=h1 9090=h1 9091=h2 9092=tcp 9093=udp"},
		{"ports:  9090  =  h2  ,, 9091 ", "8080=h1 9090=h2 9091=h1"},
		{"ports:8080=h2", "8080=h2"},
		{"ports:8080=tcp", "8080=tcp"},
		{"ports:8080|protocol:tcp", "8080=tcp"},
		{"ports:9090,9091=h1|protocol:tcp", "8080=tcp 9090=tcp 9091=h1"},
		{"ports:53=udp|port:53", "53=udp port:53"},
		{"ports:9090=h1,9090=tcp", "8080=h1 9090=tcp"}, // the later entry wins
		{"ports:9090=tcp,9090", "8080=h1 9090=h1"},
		{"ports:9090=h2,9090=h1", "8080=h1 9090=h1"},
		{"ports:http", `! endpoint.aether.io/ports: entry "http": "http" is not a number`},
		{"ports:=h1", `! endpoint.aether.io/ports: entry "=h1": no number`},
		{"ports:65536", `! endpoint.aether.io/ports: entry "65536": "65536" is too large`},
		{"ports:9090=", `! endpoint.aether.io/ports: entry "9090=": nothing after "="`},
		{"ports:9090=grpc", `! endpoint.aether.io/ports: entry "9090=grpc": unknown protocol "grpc": write h2`},
		{"ports:9090=http", `! endpoint.aether.io/ports: entry "9090=http": unknown protocol "http": write h1 or h2`},
		{"ports:9090=h1=h2", `! endpoint.aether.io/ports: entry "9090=h1=h2": unknown protocol "h1=h2"`},
		{"ports:9090=htpp", `! endpoint.aether.io/ports: entry "9090=htpp": unknown protocol "htpp"`},
		{"ports:9090 9091", `! endpoint.aether.io/ports: entry "9090 9091": "9090 9091" is not a number`},
		{"ports:18081", `! endpoint.aether.io/ports: entry "18081": port 18081 is reserved`},
		{"ports:18001=tcp", `! endpoint.aether.io/ports: entry "18001=tcp": port 18001 is reserved`},
		{"ports:8080,18008=h2", `! endpoint.aether.io/ports: entry "18008=h2": port 18008 is reserved`},
		{"ports:18082=tcp", `! endpoint.aether.io/ports: entry "18082=tcp": port 18082 is reserved`},
		{"ports:18082=udp", `! endpoint.aether.io/ports: entry "18082=udp": port 18082 is reserved`},
		{"ports:53=tcp,53=udp", "53=tcp+udp 8080=h1"}, // two transports are two ports
		{"ports:53=udp,53", "53=h1+udp 8080=h1"},
		{"ports:53=udp,53=h2,53=udp,53=tcp", "53=tcp+udp 8080=h1"},
		{"ports:8080=udp", "8080=udp"},
		{"ports:53=udp,53=udp", "53=udp 8080=h1"},

		// endpoint.aether.io/weight
		{"weight:0", "8080=h1 weight:0"},
		{"weight:4294967295", "8080=h1 weight:4294967295"},
		{"weight:4294967296", `! endpoint.aether.io/weight: "4294967296" is too large`},
		{"weight:1.5", `! endpoint.aether.io/weight: "1.5" is not a number`},
		{"weight:", `! endpoint.aether.io/weight: no number`},

		// endpoint.aether.io/health-path, health-check-mode: nothing is an error
		{"health-path:/healthz", "8080=h1 health:/healthz"},
		{"health-path:", "8080=h1"},
		{"health-check-mode:active", "8080=h1 active"},
		{"health-check-mode:eds", "8080=h1"},
		{"health-check-mode:Active", "8080=h1"},

		// endpoint.aether.io/uds-socket: a bad one degrades
		{"uds-socket:sockets/app.sock", "8080=h1 uds:sockets/app.sock"},
		{"uds-socket:app.sock", "8080=h1 uds:app.sock note endpoint.aether.io/uds-socket"},
		{"uds-socket:a/b/c", "8080=h1 uds:a/b/c note endpoint.aether.io/uds-socket"},
		{"uds-socket:../app.sock", "8080=h1 uds:../app.sock note endpoint.aether.io/uds-socket"},
		{"uds-socket:", "8080=h1 note endpoint.aether.io/uds-socket"},

		// metadata.endpoint.aether.io/<key>: keys that no subset can select are carried too
		{"metadata.endpoint.aether.io/version:v2", "8080=h1 map[version:v2]"},
		{"metadata.endpoint.aether.io/Odd_Key:a b,c|metadata.endpoint.aether.io/ip:x", "8080=h1 map[Odd_Key:a b,c ip:x]"},
		{"metadata.endpoint.aether.io/:x", "! metadata.endpoint.aether.io/: no key"},

		// config.aether.io/upstreams (contract 1.4)
		{"config.aether.io/upstreams:", "8080=h1"},
		{"config.aether.io/upstreams: cart , , db/pg, cart,shop/cart", "8080=h1 up:[shop/cart db/pg]"},
		{"config.aether.io/upstreams:a/b/c", `! config.aether.io/upstreams: entry "a/b/c"`},
		{"config.aether.io/upstreams:/b", `! config.aether.io/upstreams: entry "/b"`},
		{"config.aether.io/upstreams:a/", `! config.aether.io/upstreams: entry "a/"`},
		{"config.aether.io/upstream:a", "8080=h1 note config.aether.io/upstream"},

		// aether.io/spiffe-id (contract 1.1)
		{"aether.io/spiffe-id:spiffe://td/custom/id", "8080=h1 spiffe://td/custom/id"},
		{"aether.io/spiffe-id:", "8080=h1"},
		{"aether.io/spiffe-id:https://td/x", "! aether.io/spiffe-id: spiffeid: "},
		{"aether.io/spiffe-id:spiffe://td", "! aether.io/spiffe-id: names a trust domain"},
		{"aether.io/spiffe-id:spiffe://td/a//b", "! aether.io/spiffe-id: spiffeid: "},

		// Others' annotations, and misspelt ones of ours.
		{"example.com/port:x|aether.io/identity-gate:false", "8080=h1"},
		{"protocl:tcp", "! endpoint.aether.io/protocl: no such annotation"},
	} {
		t.Run(tt.ann, func(t *testing.T) {
			m, err := Parse("shop", "cart-1", annotations(tt.ann))
			got := show(m)
			if err != nil {
				var e Error
				if !errors.As(err, &e) {
					t.Fatalf("%v holds no Error", err)
				}
				if !reflect.DeepEqual(m, Meta{}) {
					t.Errorf("an error, and yet %+v", m)
				}
				if e.Pod != "shop/cart-1" || e.Value != annotations(tt.ann)[e.Key] {
					t.Errorf("error names pod %q and value %q", e.Pod, e.Value)
				}
				got = "! " + e.Key + ": " + e.Reason
			}
			if got != tt.want && !(strings.HasPrefix(tt.want, "!") && strings.HasPrefix(got, tt.want)) {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func annotations(s string) map[string]string {
	m := map[string]string{}
	for pair := range strings.SplitSeq(s, "|") {
		if k, v, ok := strings.Cut(pair, ":"); ok {
			if !strings.Contains(k, ".") {
				k = endpointPrefix + k
			}
			m[k] = v
		}
	}
	return m
}

func TestParseReportsEveryMistake(t *testing.T) {
	_, err := Parse("shop", "cart-1", annotations("port:x|ports:1=y,2=z|weight:w|aether.io/spiffe-id:q"))
	var all Errors
	if !errors.As(err, &all) {
		t.Fatalf("error is %T", err)
	}
	var keys []string
	for _, e := range all {
		keys = append(keys, e.Key)
	}
	want := []string{KeySPIFFEID, KeyPort, KeyPorts, KeyPorts, KeyWeight}
	if !slices.Equal(keys, want) {
		t.Errorf("got %v, want %v", keys, want)
	}
	if want := `pod shop/cart-1: annotation endpoint.aether.io/weight: "w": "w" is not a number: write a whole number from 0 to 4294967295, digits only, or drop the annotation for 1024`; all[4].Error() != want {
		t.Errorf("got  %s\nwant %s", all[4], want)
	}
	if got := err.Error(); strings.Count(got, "; pod shop/cart-1: ") != 4 {
		t.Errorf("joined: %s", got)
	}
}

// FuzzParse: whatever the annotations say, what is accepted is a set that may
// be served, and what is refused says which annotation.
func FuzzParse(f *testing.F) {
	f.Add("8080", "8080=h2, 5432=tcp,53=udp,,9090", "tcp", "cart, db/pg", "7")
	f.Add("18081", "53=tcp,53=udp", "http", "a/b/c", "")
	f.Add("", "=,=h1,1=", "", "/", "-1")
	f.Fuzz(func(t *testing.T, port, ports, protocol, upstreams, weight string) {
		m, err := Parse("shop", "cart-1", map[string]string{
			KeyPort: port, KeyPorts: ports, KeyProtocol: protocol, KeyUpstreams: upstreams, KeyWeight: weight,
		})
		if err != nil {
			var all Errors
			if !errors.As(err, &all) || len(all) == 0 {
				t.Fatalf("error %v is no Errors", err)
			}
			for _, e := range all {
				if e.Key == "" || e.Reason == "" {
					t.Fatalf("empty error %+v", e)
				}
			}
			return
		}
		hasDefault := false
		for i, p := range m.Ports {
			if i > 0 && m.Ports[i-1].Number >= p.Number {
				t.Fatalf("not ascending: %v", m.Ports)
			}
			if p.Class < model.HTTP || p.Class > model.UDP || p.Class != model.HTTP && p.App != 0 {
				t.Fatalf("impossible port %+v", p)
			}
			if model.ReservedPort(p.Number) {
				t.Fatalf("reserved port accepted: %v", m.Ports)
			}
			hasDefault = hasDefault || p.Number == m.DefaultPort
		}
		if !hasDefault {
			t.Fatalf("%v lacks the default port %d", m.Ports, m.DefaultPort)
		}
		for _, u := range m.Upstreams {
			if u.Namespace == "" || u.Name == "" || strings.Contains(u.Name, "/") {
				t.Fatalf("upstream %+v", u)
			}
		}
	})
}

// TestPortsAreBounded: the first ports of a pod are served, its default port always, and those beyond are told by number.
func TestPortsAreBounded(t *testing.T) {
	list := func(n int) string {
		var out []string
		for i := range n {
			out = append(out, fmt.Sprint(20000+i), fmt.Sprintf("%d=udp", 20000+i)) // one port, two transports
		}
		return strings.Join(out, ",")
	}
	for _, tt := range []struct{ declared, served, beyond int }{
		{1, 2, 0}, {model.MaxPorts - 1, model.MaxPorts, 0}, {model.MaxPorts, model.MaxPorts, 2}, {43000, model.MaxPorts, 2 * (43000 - model.MaxPorts + 1)},
	} {
		m, err := Parse("shop", "cart-1", map[string]string{KeyPorts: list(tt.declared)})
		if len(m.Ports) != tt.served || !slices.ContainsFunc(m.Ports, func(p model.Port) bool { return p.Number == model.DefaultPort }) {
			t.Errorf("%d declared: %d served, want %d with the default port", tt.declared, len(m.Ports), tt.served)
		}
		for _, p := range m.Ports {
			if p.Number != model.DefaultPort && (int(p.Number) >= 20000+tt.served-1 || !p.AlsoUDP) {
				t.Errorf("%d declared: port %+v is served", tt.declared, p)
			}
		}
		told := ""
		if len(m.Notes) > 0 {
			told = m.Notes[0].Error()
		}
		if is := strings.Contains(told, fmt.Sprintf("the last %d entries are not", tt.beyond)); err != nil || is != (tt.beyond > 0) || len(told) > 700 {
			t.Errorf("%d declared: %v, %.700s", tt.declared, err, told)
		}
	}
}
