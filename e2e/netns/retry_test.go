package netns

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// TestRetriesBetweenHosts (contract 5.7): a service of two pods, of which one does something wrong.
// What a client gets, and what the applications saw of it, is what the contract promises.
func TestRetriesBetweenHosts(t *testing.T) {
	t.Parallel()
	ctx := within(t, 3*patience)
	name := unique("pair")
	vips := w.ClusterIPs(93)
	if err := w.Service(rig.ServiceManifest{Name: name, ClusterIPs: vips, Ports: []uint16{portRaw, portNobody}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Remove("service-shop-" + name) })
	bad := addPod(t, ctx, mesh.Pod{Name: "pair-bad", Account: name, Node: 1, Ports: fmt.Sprintf("%d,%d", portRaw, portNobody)})
	good := addPod(t, ctx, mesh.Pod{Name: "pair-good", Account: name, Node: 1, Ports: fmt.Sprintf("%d,%d", portRaw, portNobody)})

	var mu sync.Mutex
	saw := map[string][]string{} // by request: which pods saw it
	note := func(q rawRequest, pod string) (id string) {
		id = strings.Fields(q.head)[1]
		mu.Lock()
		defer mu.Unlock()
		saw[id] = append(saw[id], pod)
		return id
	}
	length := func(q rawRequest) int64 {
		var n int64
		for line := range strings.Lines(q.head) {
			fmt.Sscanf(strings.ToLower(line), "content-length: %d", &n)
		}
		return n
	}
	ok := func(q rawRequest) {
		note(q, "good")
		b, _ := io.ReadAll(io.LimitReader(q.r, length(q)))
		fmt.Fprintf(q.c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(b), b)
	}
	var goodApp, badApp rawApp
	for _, kind := range []string{"refuse", "unavailable", "reset", "cut"} {
		goodApp.m.Store("/"+kind, ok)
	}
	badApp.m.Store("/well", func(q rawRequest) { // well, and ends: on a kept connection that dies unused its proxy may try once more
		io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		q.c.Close()
	})
	badApp.m.Store("/unavailable", func(q rawRequest) {
		note(q, "bad")
		io.CopyN(io.Discard, q.r, length(q))
		io.WriteString(q.c, "HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
	})
	badApp.m.Store("/reset", func(q rawRequest) { // delivered, and then gone
		note(q, "bad")
		io.CopyN(io.Discard, q.r, length(q))
		q.c.SetLinger(0)
		q.c.Close()
	})
	badApp.m.Store("/cut", func(q rawRequest) { // the answer has begun
		note(q, "bad")
		io.CopyN(io.Discard, q.r, length(q))
		io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
		q.c.Close()
	})
	for _, err := range []error{
		w.ServeTCP(ctx, &bad.Space, local(portRaw), badApp.serve),
		w.ServeTCP(ctx, &good.Space, local(portRaw), goodApp.serve),
		w.ServeTCP(ctx, &good.Space, local(portNobody), goodApp.serve), // and nobody at the bad one
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	clients := map[int]*http.Transport{}
	for _, port := range []int{portRaw, portNobody} {
		clients[port] = transport(t, false, w.Pod("web"), netip.AddrPortFrom(vips[0], uint16(port)).String())
		clients[port].DisableKeepAlives = true // so that net/http does not send again by itself
	}
	body := bytes.Repeat([]byte("body "), 4000)
	// one sends a request, and returns its status (0: cut) and which pods saw it.
	n := 0
	one := func(port int, method, path string) (status int, pods []string) {
		t.Helper()
		n++
		id := fmt.Sprintf("%s?%d", path, n)
		var in io.Reader
		if method != "GET" {
			in = bytes.NewReader(body)
		}
		a, err := send(ctx, clients[port], method, fmt.Sprintf("%s:%d", name, port), id, in)
		if err == nil {
			status = a.StatusCode
			if status == 200 && method != "GET" && a.body != string(body) {
				t.Errorf("%s %s: the application got %d bytes of %d", method, id, len(a.body), len(body))
			}
		} else if ctx.Err() != nil {
			t.Fatal(err)
		}
		mu.Lock()
		defer mu.Unlock()
		return status, slices.Clone(saw[id])
	}

	// Which host is asked first is drawn, and a host that fails is passed over for a while (decision 014). So the
	// good one has much to do, and the bad one does well in between.
	const held = 64
	var busy sync.WaitGroup
	release, there := make(chan struct{}), make(chan struct{}, held)
	goodApp.m.Store("/held", func(q rawRequest) {
		there <- struct{}{}
		<-release
		io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	})
	defer busy.Wait()
	defer close(release)
	for range held {
		busy.Go(func() {
			a, err := send(ctx, clients[portRaw], "GET", fmt.Sprintf("%s:%d", name, portRaw), "/held", nil, "X-Aether-Ip", good.IP4.String())
			if err != nil || a.StatusCode != 200 {
				t.Errorf("a held request: %v", err)
			}
		})
	}
	for range held {
		select {
		case <-there:
		case <-ctx.Done():
			t.Fatal("held requests do not reach the good host")
		}
	}

	for _, tt := range []struct {
		method, path string
		again        bool // what the bad one saw is seen by the good one
		status       int  // if not
	}{
		{"GET", "/unavailable", true, 0},
		{"POST", "/unavailable", true, 0}, // an application's own 503 is retried for every method
		{"PUT", "/reset", true, 0},
		{"GET", "/reset", true, 0},
		{"POST", "/reset", false, http.StatusServiceUnavailable}, // delivered: never twice
		{"PATCH", "/reset", false, http.StatusServiceUnavailable},
		{"GET", "/cut", false, 0},
	} {
		want := []string{"bad"}
		if tt.again {
			want, tt.status = []string{"bad", "good"}, 200
		}
		met := 0
		for tries := 0; met < 3; tries++ {
			if tries == 200 {
				t.Fatalf("%s %s: the bad host was asked %d times in %d", tt.method, tt.path, met, tries)
			}
			status, pods := one(portRaw, tt.method, tt.path)
			if slices.Equal(pods, []string{"good"}) && status == 200 {
				continue
			}
			met++
			for range 8 {
				mustSend(t, ctx, clients[portRaw], "GET", fmt.Sprintf("%s:%d", name, portRaw), "/well", nil, "X-Aether-Ip", bad.IP4.String())
			}
			if status != tt.status || !slices.Equal(pods, want) {
				t.Errorf("%s %s: %d, seen by %v; want %d, %v", tt.method, tt.path, status, pods, tt.status, want)
			}
		}
	}

	// Nobody listens at one: every request is answered by the other, whatever its method.
	for _, method := range []string{"GET", "POST", "PUT", "PATCH"} {
		for range 8 {
			if status, pods := one(portNobody, method, "/refuse"); status != 200 || !slices.Equal(pods, []string{"good"}) {
				t.Errorf("%s, one host refuses: %d, seen by %v", method, status, pods)
			}
		}
	}
}
