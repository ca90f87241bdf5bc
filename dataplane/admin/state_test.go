package admin

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"aether/dataplane"
	"aether/dataplane/engine"
	"aether/dataplane/outbound"
)

// TestTables: what is open, for people; what is missing is said beneath.
func TestTables(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	var b strings.Builder
	WriteConnections(&b, &dataplane.Connections{
		Connections: []engine.ConnState{
			{Pod: "shop/web-1", Role: "captured", Client: netip.MustParseAddrPort("10.1.1.10:40000"), Destination: netip.MustParseAddrPort("10.96.0.10:8080"),
				Protocol: "http1", State: "idle", AgeMS: 90_500, IdleMS: 12, Requests: 3, BytesIn: 100, BytesOut: 200},
			{Pod: "shop/web-1", Role: "inbound", Destination: netip.MustParseAddrPort("0.0.0.0:8080"), Protocol: "h2", State: "stream", AgeMS: 72 * 3_600_000, Streams: 2, Peer: "spiffe://td/ns/shop/sa/job"},
		},
		Total: 5, Silent: []int{1},
	})
	want := `POD         ROLE      CLIENT           DESTINATION      PROTOCOL  STATE   AGE    IDLE  REQUESTS  STREAMS  IN   OUT  PEER
shop/web-1  captured  10.1.1.10:40000  10.96.0.10:8080  http1     idle    1m30s  12ms  3         0        100  200  -
shop/web-1  inbound   -                :8080            h2        stream  3d     0s    0         2        0    0    spiffe://td/ns/shop/sa/job
# 2 of 5 are shown: ask for more by limit (2000 at most), or for one pod
# loop 1 did not answer: what it carries is missing here; /debug/pprof/goroutine says what it is stuck in
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	WriteSessions(&b, &dataplane.Sessions{Total: 1, Sessions: []engine.SessionState{{
		Pod: "shop/web-1", Identity: "spiffe://td/ns/shop/sa/web", Endpoint: netip.MustParseAddrPort("10.1.2.10:18008"), Port: 8080, Peer: "spiffe://td/ns/shop/sa/cart",
		State: "ready", Streams: 4, Requests: 9, AgeMS: 1500, Until: now.Add(90 * time.Minute),
	}}}, now)
	want = `POD         ENDPOINT         PORT  STATE  STREAMS  WAITING  REQUESTS  AGE   IDLE  CERTIFICATES  IDENTITY                    PEER
shop/web-1  10.1.2.10:18008  8080  ready  4        0        9         1.5s  0s    1h30m0s       spiffe://td/ns/shop/sa/web  spiffe://td/ns/shop/sa/cart
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	WriteEndpoints(&b, &dataplane.Endpoints{Total: 2, Endpoints: []outbound.EndpointState{
		{Pod: "shop/web-1", Destination: "shop/cart:8080", Endpoint: netip.MustParseAddrPort("10.1.2.10:18008"), Open: 2, Sessions: 1, LatencyMS: 3.14},
		{Pod: "shop/web-1", Destination: "shop/cart:8080", Endpoint: netip.MustParseAddrPort("10.1.2.11:18008"), Trouble: 1.5, EjectedMS: 29_500, Ejections: 2},
	}})
	want = `POD         DESTINATION     ENDPOINT         OPEN  SESSIONS  LATENCY  TROUBLE  EJECTED-FOR  EJECTIONS
shop/web-1  shop/cart:8080  10.1.2.10:18008  2     1         3.1ms    0.0      -            0
shop/web-1  shop/cart:8080  10.1.2.11:18008  0     0         -        1.5      29.5s        2
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	WriteCertificates(&b, &dataplane.Certificates{Total: 2, Certificates: []dataplane.CertState{
		{Pod: "shop/web-1", Wanted: "spiffe://td/ns/shop/sa/web", State: "valid", Serial: "0a", Issuer: "CN=ca", NotAfter: now.Add(time.Hour), AgeMS: 60_000,
			Bundle: []dataplane.CAState{{NotAfter: now.Add(100 * time.Hour)}, {NotAfter: now.Add(50 * time.Hour)}}},
		{Pod: "shop/web-2", Wanted: "spiffe://td/ns/shop/sa/web", State: "missing"},
	}}, now)
	want = `POD         STATE    ENDS-IN  AGE   SERIAL  SPIFFE-ID                   TRUST-BUNDLE         ISSUER
shop/web-1  valid    1h0m0s   1m0s  0a      spiffe://td/ns/shop/sa/web  2, first ends in 2d  CN=ca
shop/web-2  missing  -        0s    -       spiffe://td/ns/shop/sa/web  -                    -
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}
