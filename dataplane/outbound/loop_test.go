package outbound

import (
	"net"
	"net/netip"
	"testing"

	"aether/dataplane/model"
	"aether/e2e/testseed"
)

// ownAddresses are addresses of this network namespace, which no status lists, in whatever spelling.
func ownAddresses(t *testing.T) (all []netip.Addr) {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p.Addr())
	}
	return all
}

// TestNothingLeadsBack: no connection to one of the mesh's own ports is passed on to an address of the pod's own,
// whatever the status lists of them and however they are spelled, and none to 18001 to any address at all.
func TestNothingLeadsBack(t *testing.T) {
	g := newGateway(t, firstBytesMesh)
	r := testseed.Rand(t)
	own := ownAddresses(t)
	foreign := 0
	for range 400 {
		port := []uint16{model.PortCapture, model.PortMesh, model.PortProxy, model.PortRaw}[r.IntN(4)]
		var a netip.Addr
		mine := true
		switch r.IntN(6) {
		case 0:
			a = own[r.IntN(len(own))]
		case 1:
			a = netip.AddrFrom4([4]byte{127, byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())})
		case 2:
			a = netip.AddrFrom16([16]byte{0xfe, 0x80 | byte(r.IntN(64)), 15: byte(r.Uint32())})
		case 3:
			a = netip.IPv4Unspecified()
		case 4:
			a = netip.IPv6Loopback()
		default:
			a, mine = netip.AddrFrom4([4]byte{203, 0, 113, byte(r.Uint32())}), port == model.PortCapture
		}
		if a.Is4() && r.IntN(2) == 0 {
			a = netip.AddrFrom16(a.As16()) // v4-mapped
		}
		in := []string{"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", "\x00\x01", "\x16\x03\x01\x00\x05\x02"}[r.IntN(3)]
		got := status(g.send(netip.AddrPortFrom(a, port), in))
		switch {
		case mine && got != "closed":
			t.Errorf("%s, port %d, %q: %s", a, port, in, got)
		case !mine && got != "passed":
			t.Errorf("%s, port %d, %q: %s, and nothing leads back there", a, port, in, got)
		case !mine:
			foreign++
		}
	}
	if foreign == 0 || len(own) < 2 {
		t.Errorf("%d addresses elsewhere, %v own: the test shows nothing", foreign, own)
	}
}

// TestConnectNeverTunnels: CONNECT on the proxy port, or captured at an HTTP port, leads nowhere (contract 4.8).
func TestConnectNeverTunnels(t *testing.T) {
	g := newGateway(t, firstBytesMesh)
	for _, dst := range []netip.AddrPort{{}, netip.MustParseAddrPort("10.96.0.1:8080")} {
		for target, want := range map[string]string{
			"127.0.0.1:18001": "404", "[::1]:18008": "404", "localhost:18081": "404", "cart:8080": "404", "[::ffff:127.0.0.1]:18001": "404",
			"127.0.0.1:018001": "400", "127.0.0.1:0": "400", "127.0.0.1": "400",
		} {
			if got := status(g.send(dst, "CONNECT "+target+" HTTP/1.1\r\nHost: "+target+"\r\n\r\n")); got != want {
				t.Errorf("CONNECT %s to %v: %s, want %s", target, dst, got, want)
			}
		}
	}
}
