package registry

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

const domain = "td.example"

// The words of contract 9.2 and 9.3, one a line: a row, and what is wrong with it.
func TestRowFault(t *testing.T) {
	for _, tt := range []struct {
		name string
		mend func(*registrypb.ServiceEndpoint)
		want Fault
		says string
	}{
		{"a good row", func(e *registrypb.ServiceEndpoint) {}, NoFault, ""},
		{"ip empty", func(e *registrypb.ServiceEndpoint) { e.Ip = "" }, BadAddress, `ip ""`},
		{"ip is a name", func(e *registrypb.ServiceEndpoint) { e.Ip = "cart" }, BadAddress, `ip "cart"`},
		{"ip is nobody's", func(e *registrypb.ServiceEndpoint) { e.Ip = "0.0.0.0" }, BadAddress, `ip "0.0.0.0"`},
		{"ip has a zone", func(e *registrypb.ServiceEndpoint) { e.Ip = "fe80::1%eth0" }, BadAddress, `ip "fe80::1%eth0"`},
		{"ip is IPv6", func(e *registrypb.ServiceEndpoint) { e.Ip = "fd00::7" }, NoFault, ""},
		{"cluster_name empty", func(e *registrypb.ServiceEndpoint) { e.ClusterName = "" }, NoCluster, "cluster_name"},
		{"more ports than a pod may have", func(e *registrypb.ServiceEndpoint) {
			for p := range uint32(model.MaxPorts) {
				e.Ports = append(e.Ports, 20000+p)
				e.PortProtocols[20000+p] = 1
			}
		}, ManyPorts, "more than 256"},
		{"port above 65535", func(e *registrypb.ServiceEndpoint) { e.Port = 65536 }, BadPort, "port 65536"},
		{"port 65535", func(e *registrypb.ServiceEndpoint) { e.Port = 65535 }, NoFault, ""},
		{"port 0", func(e *registrypb.ServiceEndpoint) { e.Port = 0 }, NoFault, ""},
		{"no ports: older than per-port classes", func(e *registrypb.ServiceEndpoint) { e.Ports, e.PortProtocols = nil, nil }, NoPorts, "declares no port"},
		{"no ports, but classes", func(e *registrypb.ServiceEndpoint) { e.Ports = nil }, NoPorts, "declares no port"},
		{"ports above 65535", func(e *registrypb.ServiceEndpoint) { e.Ports = append(e.Ports, 70000); e.PortProtocols[70000] = 1 }, BadPort, "port 70000"},
		{"ports has 0", func(e *registrypb.ServiceEndpoint) { e.Ports = append(e.Ports, 0); e.PortProtocols[0] = 1 }, NoFault, ""},
		{"a port without a class", func(e *registrypb.ServiceEndpoint) { delete(e.PortProtocols, 9000) }, Unclassed, "port 9000"},
		{"a port of the class UNSPECIFIED", func(e *registrypb.ServiceEndpoint) { e.PortProtocols[9000] = 0 }, Unclassed, "port 9000"},
		{"no classes at all", func(e *registrypb.ServiceEndpoint) { e.PortProtocols = nil }, Unclassed, "port 8080"},
		{"a class for a port that is not there", func(e *registrypb.ServiceEndpoint) { e.PortProtocols[81], e.PortProtocols[82] = 1, 1 }, Undeclared, "port 81"},
		{"a class of a newer version", func(e *registrypb.ServiceEndpoint) { e.PortProtocols[9000] = 77 }, NoFault, ""},
		{"a reserved port beside others", func(e *registrypb.ServiceEndpoint) { e.Ports = append(e.Ports, 18081); e.PortProtocols[18081] = 1 }, NoFault, ""},
		{"udp_ports of a declared port", func(e *registrypb.ServiceEndpoint) { e.UdpPorts = []uint32{9000} }, NoFault, ""},
		{"udp_ports of another", func(e *registrypb.ServiceEndpoint) { e.UdpPorts = []uint32{53} }, Undeclared, "port 53"},
		{"a spiffe_id of the namespace", func(e *registrypb.ServiceEndpoint) { e.SpiffeId = "spiffe://td.example/ns/shop/sa/other" }, NoFault, ""},
		{"spiffe_id of an authority", func(e *registrypb.ServiceEndpoint) { e.SpiffeId = "spiffe://other.example" }, BadIdentity, "spiffe_id"},
		{"spiffe_id is none", func(e *registrypb.ServiceEndpoint) { e.SpiffeId = "https://x/" }, BadIdentity, "spiffe_id"},
		{"health of a newer version", func(e *registrypb.ServiceEndpoint) { e.Health = 9 }, NoFault, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := &registrypb.ServiceEndpoint{
				Ip: "10.1.0.7", ClusterName: "east", Port: 8080, Ports: []uint32{8080, 9000},
				PortProtocols: map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP, 9000: registrypb.PortProtocol_PORT_PROTOCOL_TCP},
			}
			tt.mend(e)
			got, says := RowFault(e)
			if got != tt.want || !strings.Contains(says, tt.says) || (got == NoFault) != (says == "") {
				t.Errorf("%q %q, want %q and %q", got, says, tt.want, tt.says)
			}
			if got != NoFault && !slices.Contains(Faults(), got) {
				t.Errorf("%q is not among Faults", got)
			}
			if _, err := Endpoint(model.ServiceName{Namespace: "shop", Name: "cart"}, domain, e); (err != nil) != (tt.want != NoFault) {
				t.Errorf("Endpoint says %v", err)
			}
		})
	}
}

// What a newer version writes never takes a pod away, and never sends traffic where
// this one cannot know that it is wanted.
func TestEndpointOfNewerVersion(t *testing.T) {
	e := &registrypb.ServiceEndpoint{
		Ip: "10.1.0.7", ClusterName: "east", Port: 8080, Ports: []uint32{0, 8080, 9443, 53}, Health: 9, UdpPorts: []uint32{53, 8080, 9443},
		PortProtocols: map[uint32]registrypb.PortProtocol{0: 1, 8080: 1, 9443: 77, 53: 3},
	}
	got, err := Endpoint(model.ServiceName{Namespace: "shop", Name: "cart"}, domain, e)
	if err != nil {
		t.Fatal(err)
	}
	want := []model.Port{{Number: 53, Class: model.UDP}, {Number: 8080, Class: model.HTTP, AlsoUDP: true}}
	if !slices.Equal(got.Ports, want) || got.Health != model.Unhealthy || got.SPIFFEID != "spiffe://td.example/ns/shop/sa/cart" {
		t.Errorf("%+v", got)
	}
	if got := Protocols(e); !slices.Equal(got, []registrypb.Service_Protocol{registrypb.Service_PROTOCOL_HTTP, registrypb.Service_PROTOCOL_UDP}) {
		t.Errorf("registered under %v", got)
	}
}

// Weight 0 is the default where nobody says that it is meant (implicit presence).
func TestWeight(t *testing.T) {
	for _, tt := range []struct {
		weight     uint32
		weightless bool
		want       uint32
	}{{0, false, 1024}, {0, true, 0}, {7, false, 7}, {7, true, 7}} {
		if got := Weight(&registrypb.ServiceEndpoint{Weight: tt.weight, Weightless: tt.weightless}); got != tt.want {
			t.Errorf("weight %d, weightless %v: %d, want %d", tt.weight, tt.weightless, got, tt.want)
		}
	}
}

func randomEndpoint(r *rand.Rand) model.Endpoint {
	word := func(of ...string) string { return of[r.IntN(len(of))] }
	e := model.Endpoint{
		Service: model.ServiceName{Namespace: word("shop", "pay"), Name: word("cart", "web", "db")},
		Pod:     word("", "cart-1", "web-7"), Node: word("", "node1", "node2"), Cluster: word("east", "west"),
		Region: word("", "eu"), Zone: word("", "eu-1"), DefaultPort: uint16(r.IntN(1 << 16)), Weight: uint32(r.IntN(3)) * 512,
		Health: model.Health(r.IntN(4)),
		IP:     netip.AddrFrom4([4]byte{10, byte(r.IntN(256)), 3, 4}),
	}
	if r.IntN(4) == 0 {
		e.IP = netip.MustParseAddr(fmt.Sprintf("fd00::%x", 1+r.IntN(1000)))
	}
	e.SPIFFEID = "spiffe://" + domain + "/ns/" + e.Service.Namespace + "/sa/" + e.Service.Name
	if r.IntN(2) == 0 {
		e.SPIFFEID += "/custom"
	}
	if r.IntN(2) == 0 {
		e.Metadata = map[string]string{"version": word("1", "2"), "Odd Key": ""}
	}
	ports := map[uint16]model.Port{}
	for range 1 + r.IntN(5) {
		n := uint16(1 + r.IntN(18000)) // below the mesh's own
		c := model.HTTP + model.Class(r.IntN(3))
		ports[n] = model.Port{Number: n, Class: c, AlsoUDP: c != model.UDP && r.IntN(4) == 0}
	}
	for _, n := range slices.Sorted(maps.Keys(ports)) {
		e.Ports = append(e.Ports, ports[n])
	}
	return e
}

// What is encoded, written, and read again is what it was; it is valid; and it is
// found under each class that it serves and no other.
func TestEncode(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 3))
	for range 5000 {
		e := randomEndpoint(r)
		row := Encode(domain, &e, Local{ContainerID: "c", NetNS: "/run/netns/x", NodeIP: netip.MustParseAddr("192.0.2.1"), Check: registrypb.ServiceEndpoint_EDS})
		if f, why := RowFault(row); f != NoFault {
			t.Fatalf("%+v: %s %s", e, f, why)
		}
		b, err := proto.Marshal(row)
		if err != nil {
			t.Fatal(err)
		}
		var again registrypb.ServiceEndpoint
		if err := proto.Unmarshal(b, &again); err != nil {
			t.Fatal(err)
		}
		got, err := Endpoint(e.Service, domain, &again)
		if err != nil || !reflect.DeepEqual(got, e) {
			t.Fatalf("%v\ngot  %+v\nwant %+v", err, got, e)
		}
		if again.GetKubernetesMetadata().GetNodeIp() != "192.0.2.1" || again.GetContainerMetadata().GetContainerId() != "c" ||
			again.GetContainerMetadata().GetNetworkNamespace() != "/run/netns/x" || again.GetHealthCheckMode() != registrypb.ServiceEndpoint_EDS {
			t.Fatalf("what only the node has a use for: %v", &again)
		}
		if own := strings.HasSuffix(e.SPIFFEID, "/custom"); own != (again.GetSpiffeId() != "") {
			t.Fatalf("identity %s has spiffe_id %q", e.SPIFFEID, again.GetSpiffeId())
		}
		for c := model.HTTP; c <= model.UDP; c++ {
			serves := slices.ContainsFunc(e.Ports, func(p model.Port) bool { return p.Class == c || c == model.UDP && p.AlsoUDP })
			if serves != slices.Contains(Protocols(&again), registrypb.Service_Protocol(c)) {
				t.Fatalf("%+v: registered under %v", e.Ports, Protocols(&again))
			}
		}
	}
}

func TestParseService(t *testing.T) {
	for key, want := range map[string]string{ // contract 1.1: a hard error, never another name
		"shop/cart": "shop/cart", "cart": "", "/cart": "", "shop/": "", "a/b/c": "", "": "",
	} {
		n, err := ParseService(key)
		if (err == nil) != (want != "") || err == nil && n.String() != want {
			t.Errorf("%q: %v, %v", key, n, err)
		}
	}
}

// TestNameFault: a name is one where Kubernetes takes it as a namespace, and a mesh name as one label.
func TestNameFault(t *testing.T) {
	for i, part := range []string{"cart", "1cart", "a", "c-1", strings.Repeat("a", 63)} {
		for _, n := range []model.ServiceName{{Namespace: part, Name: "cart"}, {Namespace: "shop", Name: part}} {
			if why := NameFault(n); why != "" {
				t.Errorf("%d: %s", i, why)
			}
		}
	}
	for _, part := range []string{"", "Cart", "a.b", "a_b", "-a", "a-", "a b", "é", "a\x00", "a\n", strings.Repeat("a", 64)} {
		if why := NameFault(model.ServiceName{Namespace: part, Name: "cart"}); !strings.HasPrefix(why, "namespace ") || !strings.Contains(why, "write ") {
			t.Errorf("namespace %q: %q", part, why)
		}
		if why := NameFault(model.ServiceName{Namespace: "shop", Name: part}); !strings.HasPrefix(why, "service account ") || !strings.Contains(why, "give ") {
			t.Errorf("name %q: %q", part, why)
		}
	}
}
