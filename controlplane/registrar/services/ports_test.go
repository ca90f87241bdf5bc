package services

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"aether/controlplane/registrypb"
)

// row makes a row of "8080=http 53=udp,also": ports with classes, and which of them are UDP too.
func row(t *testing.T, ip, ports string) *registrypb.ServiceEndpoint {
	t.Helper()
	e := &registrypb.ServiceEndpoint{Ip: ip, ClusterName: "local", Weight: 1024, PortProtocols: map[uint32]registrypb.PortProtocol{}}
	for _, f := range strings.Fields(ports) {
		number, class, _ := strings.Cut(f, "=")
		n, err := strconv.ParseUint(number, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		class, also := strings.CutSuffix(class, "+udp")
		if also {
			e.UdpPorts = append(e.UdpPorts, uint32(n))
		}
		e.Ports = append(e.Ports, uint32(n))
		if class != "" {
			e.PortProtocols[uint32(n)] = map[string]registrypb.PortProtocol{
				"http": registrypb.PortProtocol_PORT_PROTOCOL_HTTP, "tcp": registrypb.PortProtocol_PORT_PROTOCOL_TCP, "udp": registrypb.PortProtocol_PORT_PROTOCOL_UDP,
			}[class]
		}
		if e.Port == 0 {
			e.Port = uint32(n)
		}
	}
	return e
}

func (p port) String() string {
	s := fmt.Sprintf("%s:%d/%s>%s", p.name, p.number, p.protocol, p.target.String())
	if p.app != "" {
		s += "," + p.app
	}
	return s
}

// TestSpec is contract 9.8's list of ports. mesh and mesh-tcp are in every answer and left out here.
func TestSpec(t *testing.T) {
	for _, tt := range []struct {
		name    string
		rows    []string
		want    string
		warning string // a part of it
	}{
		{"one port", []string{"8080=http"}, "p8080-tcp:8080/TCP>8080,http", ""},
		{"the classes", []string{"8080=http 5432=tcp 53=udp"}, "p53-udp:53/UDP>53 p5432-tcp:5432/TCP>5432,tcp p8080-tcp:8080/TCP>8080,http", ""},
		{"one number, two transports", []string{"53=tcp+udp"}, "p53-tcp:53/TCP>53,tcp p53-udp:53/UDP>53", ""},
		{"the union of rows", []string{"8080=http", "8080=http 9090=tcp"}, "p8080-tcp:8080/TCP>8080,http p9090-tcp:9090/TCP>9090,tcp", ""},
		{"reserved ports are left off", []string{"8080=http 18081=http 18082=udp"}, "p8080-tcp:8080/TCP>8080,http", "port 18081 is the mesh's own"},
		{"port 0, which pods may declare", []string{"0=http 8080=http"}, "p8080-tcp:8080/TCP>8080,http", ""},
		{"the majority", []string{"8080=http", "8080=tcp", "8080=tcp"}, "p8080-tcp:8080/TCP>8080,tcp", "pods disagree on port 8080"},
		{"a tie is HTTP's, whoever comes first", []string{"8080=tcp", "8080=http"}, "p8080-tcp:8080/TCP>8080,http", "pods disagree on port 8080"},
		{"an invalid row has no say", []string{"8080=http", "9090"}, "p8080-tcp:8080/TCP>8080,http", ""},
		{"nothing valid", []string{"9090"}, "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var rows []*registrypb.ServiceEndpoint
			for i, r := range tt.rows {
				rows = append(rows, row(t, fmt.Sprintf("10.0.0.%d", i+1), r))
			}
			s := specOf(rows)
			var got []string
			mesh := 0
			for _, p := range s.ports {
				switch p.String() {
				case "mesh:18081/TCP>18081", "mesh-tcp:18082/TCP>18082":
					mesh++
				default:
					got = append(got, p.String())
				}
			}
			if g := strings.Join(got, " "); g != tt.want || mesh != 2 {
				t.Errorf("got  %s, and %d of the mesh's own\nwant %s, and 2", g, mesh, tt.want)
			}
			if !strings.Contains(s.warning, tt.warning) || (s.warning == "") != (tt.warning == "") {
				t.Errorf("warning %q, want one with %q", s.warning, tt.warning)
			}
			slices.Reverse(rows)
			if back := specOf(rows); !slices.Equal(back.ports, s.ports) || back.warning != s.warning {
				t.Errorf("in another order of rows: %v %q, not %v %q", back.ports, back.warning, s.ports, s.warning)
			}
		})
	}
}

func TestSpecIsBounded(t *testing.T) {
	var rows []*registrypb.ServiceEndpoint
	for n := 1; n <= 2*maxPorts; { // pods of one service that declare different ports, each as many as a row may
		var many strings.Builder
		for i := 0; i < 200; i++ {
			fmt.Fprintf(&many, "%d=tcp ", n)
			n++
		}
		rows = append(rows, row(t, fmt.Sprintf("10.0.0.%d", 1+len(rows)), many.String()))
	}
	s := specOf(rows)
	if len(s.ports) != maxPorts+2 || !strings.Contains(s.warning, fmt.Sprintf("%d ports beyond the first %d", maxPorts, maxPorts)) {
		t.Errorf("%d ports, warning %q", len(s.ports), s.warning)
	}
}
