package netns

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
)

// TestIPv6: captured dials to Service and foreign addresses, and the proxy port.
func TestIPv6(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "app "+r.Host) })
	v6 := netip.AddrPortFrom(w.ClusterIPs(appVIP)[1], portH1).String()
	for _, tt := range []struct {
		name, from, addr, host string
		h2                     bool
	}{
		{"h1 to the Service", "web", v6, "app", false},
		{"h2c to the Service", "web", v6, appName + ":8080", true},
		{"proxy port", "job", "[::1]:18081", appName + ":8080", false},
		{"proxy port, h2c", "job", "[::1]:18081", appName + ":8080", true},
	} {
		a := mustSend(t, ctx, transport(t, tt.h2, w.Pod(tt.from), tt.addr), "GET", tt.host, path, nil)
		if a.body != "app "+tt.host {
			t.Errorf("%s: %d %q", tt.name, a.StatusCode, a.body)
		}
	}
	// Outside the mesh: the pod's own IPv6 address.
	l := listen(t, ctx, &w.out.Space, netip.AddrPortFrom(w.out.IP6, 0).String())
	c := dial(t, ctx, w.Pod("web"), l.Addr().String())
	s := acceptOne(t, ctx, l) // server first: the connection is there before a byte
	if ip := s.RemoteAddr().(*net.TCPAddr).AddrPort(); ip.Addr() != w.Pod("web").IP6 || ip.Port() == uint16(c.LocalAddr().(*net.TCPAddr).Port) {
		t.Errorf("the server sees %v, want a connection of the proxy from %v", ip, w.Pod("web").IP6)
	}
	say(t, s, "220 ready\r\n")
	expect(t, c, "220 ready\r\n")
	say(t, c, "QUIT\r\n")
	expect(t, s, "QUIT\r\n")
	s.Close()
	expectEnd(t, c)
}
