package netns

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestOpenThings: what a node carries is what its admin says: a request that an application
// has not answered yet is a connection at its client's pod, a session of that pod's to
// the other node, and a connection of a caller with that pod's identity there; a relay
// is a connection at both. Certificates are those that the pods show.
func TestOpenThings(t *testing.T) {
	ctx := within(t, patience)
	entered, goOn := make(chan struct{}), make(chan struct{})
	path := w.app.at(t, func(http.ResponseWriter, *http.Request) { close(entered); <-goOn })
	web := w.Pod("web")
	c := dial(t, ctx, web, vip(appVIP, portH1))
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: app\r\n\r\n", path)
	recv(t, ctx, entered, "the request")
	raw := dial(t, ctx, web, vip(appVIP, portEcho))
	say(t, raw, "hello")
	expect(t, raw, "hello")

	type connection struct {
		Pod, Role, Peer, Protocol, State string
		Client, Destination              netip.AddrPort
		Streams                          int
	}
	node := func(node int, what string, v any) {
		t.Helper()
		b, err := w.Admin(ctx, node, what+"&format=json")
		if err == nil {
			err = json.Unmarshal(b, v)
		}
		if err != nil {
			t.Fatalf("%s: %v: %s", what, err, b)
		}
	}
	connections := func(at int, pod string) []connection {
		t.Helper()
		var all struct{ Connections []connection }
		node(at, "/connections?limit=2000&pod="+pod, &all)
		return all.Connections
	}
	has := func(what string, all []connection, is func(*connection) bool) {
		t.Helper()
		for i := range all {
			if is(&all[i]) {
				return
			}
		}
		t.Errorf("no %s in %+v", what, all)
	}
	const caller = "/ns/shop/sa/web"
	from := connections(0, "shop/web")
	has("request", from, func(x *connection) bool {
		return x.Role == "captured" && x.Client.String() == c.LocalAddr().String() && x.Destination.String() == vip(appVIP, portH1) &&
			x.Protocol == "http1" && x.State == "response" && x.Streams == 1
	})
	has("relay", from, func(x *connection) bool {
		return x.Role == "captured" && x.Client.String() == raw.LocalAddr().String() && x.Destination.String() == vip(appVIP, portEcho) &&
			x.Protocol == "tcp" && x.State == "relay" && strings.HasSuffix(x.Peer, "/ns/shop/sa/app")
	})
	to := connections(1, "shop/app")
	has("request of the caller", to, func(x *connection) bool {
		return x.Role == "inbound" && strings.HasSuffix(x.Peer, caller) && x.Protocol == "h2" && x.State == "stream" && x.Client.Addr() == web.IP4
	})
	has("relay of the caller", to, func(x *connection) bool {
		return x.Role == "inbound" && strings.HasSuffix(x.Peer, caller) && x.Protocol == "tcp" && x.Destination.Port() == portEcho
	})
	has("delivery", to, func(x *connection) bool { return x.Role == "application" && x.Destination.String() == local(portH1) })

	var sessions struct {
		Sessions []struct {
			Pod, Identity, Peer, State string
			Endpoint                   netip.AddrPort
			Port                       uint16
			Streams                    int
			Until                      time.Time `json:"certificates_until"`
		}
	}
	node(0, "/sessions?limit=2000&pod=shop/web", &sessions)
	found := false
	for _, s := range sessions.Sessions {
		found = found || s.Port == portH1 && s.Endpoint == netip.AddrPortFrom(w.Pod("app").IP4, 18008) && s.Streams >= 1 && s.State == "ready" &&
			strings.HasSuffix(s.Identity, caller) && strings.HasSuffix(s.Peer, "/ns/shop/sa/app") && s.Until.After(time.Now())
	}
	if !found {
		t.Errorf("no session to app: %+v", sessions.Sessions)
	}

	var certs struct {
		Certificates []struct {
			Pod, State, Serial string
			ID                 string    `json:"spiffe_id"`
			NotAfter           time.Time `json:"not_after"`
			Bundle             []struct {
				Serial   string
				NotAfter time.Time `json:"not_after"`
			}
		}
	}
	node(1, "/certs?pod=shop/app", &certs)
	// The oracle is what the pod shows to whoever connects.
	var shown *x509.Certificate
	hello := tls.Client(dial(t, ctx, w.out, netip.AddrPortFrom(w.Pod("app").IP4, 18008).String()), &tls.Config{
		ServerName: strconv.Itoa(portH1), InsecureSkipVerify: true, NextProtos: []string{"h2"},
		VerifyConnection: func(s tls.ConnectionState) error { shown = s.PeerCertificates[0]; return errors.New("seen") },
	})
	if err := hello.HandshakeContext(ctx); shown == nil {
		t.Fatalf("the pod shows no certificate: %v", err)
	}
	until := shown.NotAfter // or its authority's end, if that is earlier
	for _, c := range certs.Certificates {
		for _, ca := range c.Bundle {
			if ca.NotAfter.Before(until) {
				until = ca.NotAfter
			}
		}
	}
	if got := certs.Certificates; len(got) != 1 || got[0].Pod != "shop/app" || got[0].State != "valid" || got[0].ID != shown.URIs[0].String() ||
		got[0].Serial != hex.EncodeToString(shown.SerialNumber.Bytes()) || !got[0].NotAfter.Equal(until) || len(got[0].Bundle) == 0 {
		t.Errorf("%+v, and the pod shows %s %x until %s", got, shown.URIs[0], shown.SerialNumber, until)
	}

	close(goOn)
	if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != 200 {
		t.Errorf("%v %v", res, err)
	}
}

// TestSignals: a request that fails is a line of JSON in the log and a count under Envoy's
// flag, on both nodes; one that is answered is a count on both, each with its own spelling
// of the services (contract 14.1).
func TestSignals(t *testing.T) {
	ctx := within(t, patience)
	path := w.app.at(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	rt := transport(t, false, w.Pod("web"), vip(appVIP, portH1))
	if a := mustSend(t, ctx, rt, "GET", "app", path, nil); a.StatusCode != http.StatusTeapot {
		t.Fatal(a.Status)
	}
	const id = "00000000-1111-4222-8333-444444444444"
	c := dial(t, ctx, w.Pod("web"), vip(appVIP, portNobody))
	fmt.Fprintf(c, "GET /signals HTTP/1.1\r\nHost: app\r\nX-Request-Id: %s\r\n\r\n", id)
	if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != 503 {
		t.Fatalf("%v %v", res, err)
	}

	bad := dial(t, ctx, w.Pod("web"), vip(appVIP, portH1))
	fmt.Fprint(bad, "GET / HTTP/1.1\r\nHost: app\r\nHost: other\r\n\r\n")
	if res, err := http.ReadResponse(bufio.NewReader(bad), nil); err != nil || res.StatusCode != 400 {
		t.Fatalf("%v %v", res, err)
	}

	for node, want := range map[int][]string{
		0: {
			`aether_requests_total{destination_pod="",destination_service="unknown",port="",reporter="source",response_code="400",response_flags="DPE",source_pod="",source_service="web"} `,
			`aether_requests_total{destination_pod="",destination_service="app.shop",port="8080",reporter="source",response_code="418",response_flags="-",source_pod="",source_service="web"} `,
			`aether_requests_total{destination_pod="",destination_service="app.shop",port="8089",reporter="source",response_code="503",`,
			"aether_loop_lag_seconds_count ", "aether_hop_sessions ", `aether_requests_in_flight{direction="outbound"} `,
		},
		1: {
			`aether_requests_total{destination_pod="",destination_service="app",port="8080",reporter="destination",response_code="418",response_flags="-",source_pod="",source_service="web"} `,
			`aether_requests_total{destination_pod="",destination_service="app",port="8089",reporter="destination",response_code="503",response_flags="UF",source_pod="",source_service="web"} `,
			`aether_relays{direction="inbound"} `,
		},
	} {
		eventually(t, ctx, fmt.Sprintf("the counts of node%d", node+1), func() error {
			b, err := w.Admin(ctx, node, "/metrics")
			for _, s := range want {
				if err == nil && !bytes.Contains(b, []byte("\n"+s)) {
					err = fmt.Errorf("no %s", s)
				}
			}
			return err
		})
	}
	line := failureLine(t, ctx, 1, id)
	for name, want := range map[string]any{
		"msg": "failed", "kind": "request", "reporter": "destination", "namespace": "shop", "pod": "app", "service_account": "app", "method": "GET",
		"authority": "app", "path": "/signals", "status": 503.0, "flags": "UF", "cause": "connect", "request_id": id, "reason": "served-port",
	} {
		if line[name] != want {
			t.Errorf("%s: %v, want %v", name, line[name], want)
		}
	}
	if peer, _ := line["peer"].(string); !strings.HasSuffix(peer, "/ns/shop/sa/web") {
		t.Errorf("peer: %v", line["peer"])
	}
	if at, err := time.Parse("2006-01-02T15:04:05.000Z", fmt.Sprint(line["time"])); err != nil || time.Since(at) > time.Hour {
		t.Errorf("time: %v %v", line["time"], err)
	}
	if line := failureLine(t, ctx, 0, id); line["reporter"] != "source" || line["endpoint"] != netip.AddrPortFrom(w.Pod("app").IP4, 18008).String() {
		t.Errorf("%v", line)
	}
}

// failureLine is the line of the request with this ID in the log of a node's proxy.
func failureLine(t *testing.T, ctx context.Context, node int, id string) (line map[string]any) {
	t.Helper()
	eventually(t, ctx, fmt.Sprintf("the line of node%d", node+1), func() error {
		log, err := os.ReadFile(w.Proxy(node).Log)
		if err != nil {
			return err
		}
		for l := range bytes.Lines(log) {
			if bytes.Contains(l, []byte(`"request_id":"`+id+`"`)) {
				return json.Unmarshal(l, &line)
			}
		}
		return io.EOF
	})
	return line
}

// eventually waits for something that nothing announces: ok is asked again until it gives no error.
func eventually(t *testing.T, ctx context.Context, what string, ok func() error) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ok()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		case <-tick.C:
		}
	}
}
