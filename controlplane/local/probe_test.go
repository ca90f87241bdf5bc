package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"aether/dataplane/model"
	"aether/tproxy/netns"
	"aether/tproxy/netns/netnstest"
	"aether/tproxy/socket"
)

// dialInto dials from the namespaces, by container, as the data plane does.
func dialInto(t *testing.T, spaces map[string]*netns.NS) Dial {
	f := socket.NewFactory()
	t.Cleanup(func() { f.Close() })
	pools := map[string]*socket.Pool{}
	for c, ns := range spaces {
		pools[c] = f.Open(ns)
	}
	return func(ctx context.Context, container string, port uint16) (net.Conn, error) {
		fd, err := pools[container].Wait(ctx, false)
		if err != nil {
			return nil, err
		}
		return socket.Connect(ctx, fd, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))
	}
}

// listen takes connections in a namespace until the test ends.
func listen(t *testing.T, ns *netns.NS, addr string, serve func(net.Conn)) {
	t.Helper()
	var l net.Listener
	netnstest.Do(t, ns, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
}

// TestProbe: contract 6.6, against applications in namespaces of their own.
func TestProbe(t *testing.T) {
	app, other := netnstest.New(t), netnstest.New(t)
	heads := make(chan string, 1)
	hold := make(chan struct{})
	listen(t, app, "127.0.0.1:8080", func(c net.Conn) {
		r := bufio.NewReader(c)
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		answer := map[string]string{
			"/ok": "200 OK", "/created": "201 Created", "/none": "204 No Content", "/moved": "302 Found\r\nLocation: /ok", "/bad": "503 Busy",
			"/loop": "200 OK\r\nX: " + strings.Repeat("x", maxProbeHead),
		}[strings.SplitN(req.RequestURI, "?", 2)[0]]
		if answer == "" {
			heads <- fmt.Sprintf("%s %s %s|%s|%t", req.Method, req.RequestURI, req.Proto, req.Host, req.Close)
			answer = "200 OK"
		}
		if strings.HasSuffix(req.RequestURI, "silent") {
			<-hold
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n", answer)
	})
	listen(t, app, "0.0.0.0:9000", func(c net.Conn) { fmt.Fprint(c, "HTTP/1.1 200 OK\r\n") }) // and then nothing
	t.Cleanup(func() { close(hold) })                                                         // before the listeners' ends
	probe := Prober(dialInto(t, map[string]*netns.NS{"app": app, "other": other}))
	ask := func(limit time.Duration, x Target) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return probe(ctx, x)
	}
	for _, tt := range []struct {
		name string
		t    Target
		want bool
	}{
		{"200", Target{"app", 8080, model.HTTP, "/ok"}, true},
		{"201 is not 200", Target{"app", 8080, model.HTTP, "/created"}, false},
		{"204 is not 200", Target{"app", 8080, model.HTTP, "/none"}, false},
		{"a redirection is not followed", Target{"app", 8080, model.HTTP, "/moved"}, false},
		{"503", Target{"app", 8080, model.HTTP, "/bad"}, false},
		{"a head without end", Target{"app", 8080, model.HTTP, "/loop"}, false},
		{"half a head", Target{"app", 9000, model.HTTP, "/ok"}, false},
		{"nobody listens", Target{"app", 8081, model.HTTP, "/ok"}, false},
		{"another pod's namespace", Target{"other", 8080, model.HTTP, "/ok"}, false},
		{"tcp: a connect is enough", Target{"app", 8080, model.TCP, ""}, true},
		{"tcp: nobody listens", Target{"app", 8081, model.TCP, ""}, false},
		{"udp has nothing to ask", Target{"app", 53, model.UDP, ""}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := ask(10*time.Second, tt.t); (err == nil) != tt.want {
				t.Errorf("%v", err)
			}
		})
	}
	t.Run("what is sent", func(t *testing.T) {
		for path, want := range map[string]string{
			"/healthz?full=1&x=%2f": "GET /healthz?full=1&x=%2f HTTP/1.1|localhost|true",
			"/":                     "GET / HTTP/1.1|localhost|true",
			"/a%20b/../c":           "GET /a%20b/../c HTTP/1.1|localhost|true",
		} {
			if err := ask(10*time.Second, Target{"app", 8080, model.HTTP, path}); err != nil {
				t.Errorf("%s: %v", path, err)
				continue
			}
			if got := <-heads; got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		}
		if err := ask(10*time.Second, Target{"app", 8080, model.HTTP, "/x\r\nEvil: 1"}); err == nil {
			t.Errorf("a path with a line's end is sent: %s", <-heads)
		}
	})
	t.Run("an application that says nothing", func(t *testing.T) {
		err := ask(50*time.Millisecond, Target{"app", 8080, model.HTTP, "/silent"})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		<-heads
	})
	t.Run("why", func(t *testing.T) {
		if err := ask(10*time.Second, Target{"app", 8081, model.TCP, ""}); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%v", err)
		}
		if err := ask(10*time.Second, Target{"app", 8080, model.HTTP, "/bad"}); err == nil || !strings.Contains(err.Error(), "503") {
			t.Errorf("%v", err)
		}
	})
}

// TestCheckNetNS: what the sweep takes for a namespace.
func TestCheckNetNS(t *testing.T) {
	ns := netnstest.New(t)
	if err := checkNetNS(ns.Path()); err != nil {
		t.Error(err)
	}
	for _, path := range []string{t.TempDir() + "/none", "/proc/self/status"} {
		if err := checkNetNS(path); !errors.Is(err, netns.ErrGone) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
