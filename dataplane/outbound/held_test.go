package outbound

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
	"aether/sniff"
	"aether/tproxy/socket"
)

// heap is how much is live.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// longHello is a ClientHello of crypto/tls's with a long list of protocols and no name.
var longHello = sync.OnceValue(func() string {
	a, b := net.Pipe()
	defer b.Close()
	var protos []string
	for i := range 63 {
		protos = append(protos, fmt.Sprintf("%02d", i)+strings.Repeat("p", 238))
	}
	go func() {
		_ = tls.Client(a, &tls.Config{InsecureSkipVerify: true, NextProtos: protos}).Handshake() // it is cut off
		a.Close()
	}()
	buf := make([]byte, 32<<10)
	n, err := io.ReadAtLeast(b, buf, 15_001)
	if err != nil {
		panic(err)
	}
	return string(buf[:n])
})

// hello is its first n bytes.
func hello(n int) string { return longHello()[:n] }

// settled waits until the loop has read all that was sent to it.
func (g *gateway) settled(n int64) {
	g.t.Helper()
	until(g.t, "all is accounted", func() bool { return g.pod.Engine.BytesElsewhere() >= n })
}

// TestWhatASnifferHoldsIsCounted: what a client has sent, and what does not tell yet what it is, is in its pod's account: the
// account meets what the heap grows by. Silence holds nothing, and nothing is left of what has ended.
func TestWhatASnifferHoldsIsCounted(t *testing.T) {
	const conns = 200
	for _, k := range []struct {
		name, dst, first string
		least            int64 // bytes a connection
	}{
		{"silence", "10.96.0.1:8080", "", 0},
		{"a byte of HTTP", "10.96.0.1:8080", "G", 4096},
		{"a request line without an end", "10.96.0.1:8080", "GET /" + strings.Repeat("a", 3000), 4096},
		{"a byte of the preface", "10.96.0.1:8080", "P", 4096},
		{"a byte of TLS", "10.96.0.1:8080", hello(1), 4096},
		{"3,000 bytes of a ClientHello", "10.96.0.1:8080", hello(3000), 4096},
		{"9,000 bytes of a ClientHello", "10.96.0.1:8080", hello(9000), 9000},
		{"15,000 bytes of a ClientHello", "10.96.0.1:8080", hello(15_000), 15_000},
	} {
		t.Run(k.name, func(t *testing.T) {
			g := newGateway(t, firstBytesMesh)
			dst := netip.MustParseAddrPort(k.dst)
			heap0 := heap()
			var all []net.Conn
			for range conns {
				parts := []string{k.first}
				if k.first == "" {
					parts = nil
				}
				all = append(all, g.open(dst, parts...))
			}
			g.settled(conns * k.least)
			if k.least == 0 {
				if n := g.pod.Engine.BytesElsewhere(); n != 0 {
					t.Errorf("%d bytes are accounted", n)
				}
			} else {
				told, grown := g.pod.Engine.BytesElsewhere(), heap()-heap0
				t.Logf("the heap grew by %d KiB, the account by %d KiB", grown>>10, told>>10)
				if told > grown || told < grown/2 { // of connections there is more than their buffers
					t.Errorf("the heap grew by %d KiB, the account by %d KiB", grown>>10, told>>10)
				}
			}
			for _, c := range all {
				c.Close()
			}
			until(t, "nothing is accounted", func() bool { return g.pod.Engine.BytesElsewhere() == 0 && g.pod.Engine.Files() == 0 })
		})
	}
}

// TestSniffersOfOnePodAreBounded: a pod whose clients begin what has no end holds what a pod may, and a buffer; further ones are reset,
// and what they do is said. Another pod notices nothing, and the first one serves again when they have gone.
func TestSniffersOfOnePodAreBounded(t *testing.T) {
	const most = 4 << 20
	g := newGatewayOf(t, firstBytesMesh, 4*most)
	dst := netip.MustParseAddrPort("10.96.0.1:8080")
	var all []net.Conn
	overload := 0
	for range most/sniff.MaxPeek + 50 {
		all = append(all, g.open(dst, hello(15_000)))
		for len(g.ended) > 0 {
			if e := <-g.ended; e.Cause == causeOverload {
				overload++
			}
		}
	}
	until(t, "those beyond the bound are reset", func() bool {
		select {
		case e := <-g.ended:
			if e.Cause == causeOverload {
				overload++
			}
		default:
		}
		return overload > 0
	})
	if n := g.pod.Engine.BytesElsewhere(); n < most*3/4 || n > most+sniff.MaxPeek {
		t.Errorf("%d bytes are held, want about %d", n, most)
	}
	greedy := g.pod
	g.pod = &Pod{Context: greedy.Context, Engine: g.e.AddPod("other"), Container: "shop-other-0", Namespace: "shop", Account: "web", Sockets: &g.nowhere}
	if s := status(g.send(dst, "G", "ET / HTTP/1.1\r\nHost: cart\r\n\r\n")); s != "503" { // its endpoints are ill: it was answered
		t.Errorf("the other pod is answered %s", s)
	}
	g.pod = greedy
	if s := status(g.send(netip.MustParseAddrPort("10.96.0.2:5432"), "x")); s != "closed" {
		t.Errorf("a raw connection of the pod: %s", s)
	}
	for _, c := range all {
		c.Close()
	}
	until(t, "nothing is accounted", func() bool { return greedy.Engine.BytesElsewhere() == 0 })
	if s := status(g.send(dst, "G", "ET / HTTP/1.1\r\nHost: cart\r\n\r\n")); s != "503" {
		t.Errorf("the pod is answered %s once it holds nothing", s)
	}
}

// TestWhatAWaitingConnectionHoldsIsCounted: what was read of a connection that waits for rows is in its pod's account until the wait
// ends, in whichever way.
func TestWhatAWaitingConnectionHoldsIsCounted(t *testing.T) {
	for name, end := range map[string]func(g *gateway, k *waitingConn, client net.Conn){
		"its client resets it": func(_ *gateway, _ *waitingConn, client net.Conn) {
			_ = client.(*net.TCPConn).SetLinger(0)
			client.Close()
		},
		"nothing comes in time": func(g *gateway, k *waitingConn, _ net.Conn) { _ = g.l.Post(k.Run) },
		"other rows come": func(g *gateway, k *waitingConn, _ net.Conn) {
			s, _ := compile.Compile(modeltest.Mesh(g.t, firstBytesMesh))
			_ = g.l.Post(func() { k.reconsider(s) })
		},
		"it fails": func(g *gateway, k *waitingConn, _ net.Conn) { _ = g.l.Post(func() { k.Fail(net.ErrClosed) }) },
	} {
		t.Run(name, func(t *testing.T) {
			g := newGateway(t, firstBytesMesh)
			g.o.cfg.Want = func(model.ServiceName) {}
			client, err := net.Dial("tcp", g.ln.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			a, err := g.ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			fd, err := socket.TakeFD(a.(*net.TCPConn))
			if err != nil {
				t.Fatal(err)
			}
			waits := make(chan *waitingConn, 1)
			err = g.l.Post(func() {
				st := g.o.loops.Get(g.l)
				c := &conn{o: g.o, pod: g.pod, st: st}
				c.info = engine.ConnInfo{Pod: g.pod.Engine, Loop: g.l, User: c}
				c.flow = model.Flow{Namespace: "shop", Workload: "web", Container: g.pod.Container, Dir: model.Captured, Sniff: model.SniffOpaque,
					Dst: model.OrigDst{AddrPort: netip.MustParseAddrPort("10.96.0.1:8080")}}
				v := decide.Verdict{Action: decide.Await, Awaits: &snapshot.Service{Name: model.ServiceName{Namespace: "shop", Name: "cart"}}}
				c.await(fd, v, g.o.cfg.Store.Load(), 0, make([]byte, 5000), (*conn).begin)
				for k := range st.waiting {
					waits <- k.(*waitingConn)
				}
				close(waits)
			})
			if err != nil {
				t.Fatal(err)
			}
			k := <-waits
			if n := g.pod.Engine.BytesElsewhere(); k == nil || n != 5000 {
				t.Fatalf("%d bytes are accounted", n)
			}
			end(g, k, client)
			until(t, "nothing is accounted", func() bool { return g.pod.Engine.BytesElsewhere() == 0 && g.o.Waiting() == 0 })
		})
	}
}
