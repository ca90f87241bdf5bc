package engine

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// ConnState is a connection as it stands, for whoever shows it. The names in JSON are a
// promise to scripts; new ones may be added.
type ConnState struct {
	Pod  string `json:"pod"` // "shop/web-1"
	Loop int    `json:"loop"`
	// Role: captured, proxy or inbound, of connections to us; application, of ours to the
	// pod's application or, passed through, to the dialled address.
	Role        string         `json:"role"`
	Client      netip.AddrPort `json:"client,omitzero"`      // who connected
	Destination netip.AddrPort `json:"destination,omitzero"` // what was dialled; inbound the port alone
	Socket      string         `json:"socket,omitempty"`     // in the place of Destination: the application's Unix socket, "unix:<file>"
	Peer        string         `json:"peer,omitempty"`       // verified SPIFFE ID: inbound the caller's, of a relay over a hop the endpoint's
	Protocol    string         `json:"protocol"`             // http1, h2, tcp, or "" while it is looked at
	State       string         `json:"state"`                // sniff, idle, head, request, response, linger, connect, stream, tunnel, drain, relay
	AgeMS       int64          `json:"age_ms"`
	IdleMS      int64          `json:"idle_ms"` // since the last byte either way
	Requests    uint64         `json:"requests"`
	Streams     int            `json:"streams"` // under way
	BytesIn     int64          `json:"bytes_in"`
	BytesOut    int64          `json:"bytes_out"` // of the socket, TLS included; of a relay not known before its end
}

// Describer is a ConnInfo.User that knows what the engine does not: role, destination and peer.
type Describer interface{ Describe(*ConnState) }

// PeerAddr is the address of who is at the other end of a socket; zero: it is gone.
func PeerAddr(fd int) netip.AddrPort {
	sa, err := unix.Getpeername(fd)
	if err != nil {
		return netip.AddrPort{}
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// SessionState is a hop session as it stands, for whoever shows it. The names in JSON are
// a promise to scripts; new ones may be added.
type SessionState struct {
	Pod      string         `json:"pod"` // whose it is: "shop/web-1"
	Loop     int            `json:"loop"`
	Identity string         `json:"identity"` // the pod's own SPIFFE ID, which it shows
	Endpoint netip.AddrPort `json:"endpoint"`
	Port     uint16         `json:"port"` // of the service, and the server name
	Peer     string         `json:"peer"` // the endpoint's SPIFFE ID, which it must show
	// State: connect (being dialled), ready, full (takes no more streams now), or drain
	// (takes none any more: by GOAWAY, by age, or because its certificates end); or
	// in-process: the endpoint is of this node, and there is no session (decision 018).
	State    string    `json:"state"`
	Streams  int       `json:"streams"` // under way
	Requests uint64    `json:"requests"`
	Waiting  int       `json:"waiting"` // requests that wait for any session of this key
	AgeMS    int64     `json:"age_ms"`
	IdleMS   int64     `json:"idle_ms"`
	BytesIn  int64     `json:"bytes_in"`
	BytesOut int64     `json:"bytes_out"`
	Until    time.Time `json:"certificates_until,omitzero"` // the earlier end of the two ends' certificates
}
