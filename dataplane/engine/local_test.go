package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/tproxy/socket"
)

// unixHome makes a directory for a pod's socket; Dir/Sub/File is short enough for one.
func unixHome(t *testing.T, file string) socket.Unix {
	t.Helper()
	dir, err := os.MkdirTemp("", "ae")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Mkdir(filepath.Join(dir, "uid"), 0o777); err != nil {
		t.Fatal(err)
	}
	return socket.Unix{Dir: dir, Sub: "uid", File: file}
}

// unixApp serves connections at a Unix socket, until the test ends.
func unixApp(t *testing.T, at socket.Unix, serve func(net.Conn)) net.Listener {
	t.Helper()
	ln, err := net.Listen("unix", at.String())
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	over := false
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if over {
				c.Close()
			} else {
				open[c] = true
			}
			mu.Unlock()
			wg.Go(func() {
				serve(c)
				c.Close()
				mu.Lock()
				delete(open, c)
				mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		over = true
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return ln
}

// overUnix is a service whose application is at a Unix socket.
func overUnix(pod *Pod, to socket.Unix, h2 bool) *svc {
	v := &svc{pod: pod}
	v.request = func(x *exchange.Exchange) bool {
		x.Conn.(*ConnInfo).Loop.SendUnix(x, pod, to, h2)
		return true
	}
	return v
}

// pools counts the pools of applications on the one loop.
func pools(t *testing.T, s *stage) (n int) {
	t.Helper()
	for _, k := range ask(t, s, func(l *Loop) int { return len(l.appPools()) }) {
		n += k
	}
	return n
}

func ask[T any](t *testing.T, s *stage, f func(*Loop) T) []T {
	t.Helper()
	got, silent := Ask(context.Background(), s.e, f)
	if len(silent) > 0 {
		t.Fatalf("loops %v did not answer", silent)
	}
	return got
}

// TestUnixApplications: both codecs of client and application, over kept connections, with bodies
// larger than any buffer of a Unix socket, both ways.
func TestUnixApplications(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	for _, appH2 := range []bool{false, true} {
		for _, frontH2 := range []bool{false, true} {
			t.Run(fmt.Sprintf("client h2 %t, application h2 %t", frontH2, appH2), func(t *testing.T) {
				s := newStage(t, Config{})
				pod := s.e.AddPod("p")
				at := unixHome(t, "a.sock")
				var conns atomic.Int64
				srv := &http.Server{Protocols: new(http.Protocols), ConnState: func(_ net.Conn, st http.ConnState) {
					if st == http.StateNew {
						conns.Add(1)
					}
				}, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					b, err := io.ReadAll(r.Body)
					if err != nil {
						t.Error(err)
					}
					fmt.Fprintf(w, "%d %s", r.ProtoMajor, b)
				})}
				srv.Protocols.SetHTTP1(true)
				srv.Protocols.SetUnencryptedHTTP2(true)
				ln, err := net.Listen("unix", at.String())
				if err != nil {
					t.Fatal(err)
				}
				ended := make(chan struct{})
				go func() { srv.Serve(ln); close(ended) }()
				t.Cleanup(func() { srv.Close(); <-ended })
				p := new(http.Protocols)
				p.SetHTTP1(!frontH2)
				p.SetUnencryptedHTTP2(frontH2)
				rt := &http.Transport{DialContext: to(s.front(pod, overUnix(pod, at, appH2), frontH2)), Protocols: p}
				t.Cleanup(rt.CloseIdleConnections)
				c := &http.Client{Transport: rt}
				for _, body := range []string{"", "x", big, "y"} {
					res, err := c.Post("http://a/", "text/plain", strings.NewReader(body))
					if err != nil {
						t.Fatal(err)
					}
					b, err := io.ReadAll(res.Body)
					res.Body.Close()
					want := "1 "
					if appH2 {
						want = "2 "
					}
					if want += body; err != nil || res.StatusCode != 200 || string(b) != want {
						t.Fatalf("%d bytes: %d, %d bytes back, %v", len(body), res.StatusCode, len(b), err)
					}
				}
				if n := conns.Load(); n != 1 {
					t.Errorf("%d connections to the application for one client's requests", n)
				}
				var shown []string
				for _, list := range ask(t, s, func(l *Loop) []ConnState { list, _ := l.Conns("", 100); return list }) {
					for _, k := range list {
						if k.Role == "application" {
							shown = append(shown, k.Socket+k.Destination.String())
						}
					}
				}
				if len(shown) != 1 || !strings.HasPrefix(shown[0], "unix:a.sock") || strings.Contains(shown[0], "127.0.0.1") {
					t.Errorf("shown as %q", shown)
				}
				if n := pools(t, s); n != 1 {
					t.Errorf("%d pools", n)
				}
				srv.Close() // what is left of it is forgotten
				eventually(t, "the pool is forgotten", func() bool { return pools(t, s) == 0 })
			})
		}
	}
}

// TestUnixNobody: what cannot be connected to fails as a connect does, leaves nothing behind, and
// works once it is there.
func TestUnixNobody(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		s := newStage(t, Config{})
		pod := s.e.AddPod("p")
		at := unixHome(t, "a.sock")
		v := overUnix(pod, at, h2)
		c := &http.Client{Transport: &http.Transport{DialContext: to(s.front(pod, v, false)), DisableKeepAlives: true}}
		get := func() string {
			res, err := c.Get("http://a/")
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			b, _ := io.ReadAll(res.Body)
			return fmt.Sprintf("%d %s", res.StatusCode, b)
		}
		secret := unixApp(t, unixHome(t, "s.sock"), func(net.Conn) { t.Error("a socket behind a link was reached") })
		for _, what := range []struct {
			name string
			make func() error
		}{
			{"nothing", func() error { return nil }},
			{"a file", func() error { return os.WriteFile(at.String(), nil, 0o666) }},
			{"a link", func() error { return os.Symlink(secret.Addr().String(), at.String()) }},
		} {
			if err := what.make(); err != nil {
				t.Fatal(err)
			}
			if got := get(); got != "503 connect" {
				t.Errorf("h2 %t, %s: %s", h2, what.name, got)
			}
			os.Remove(at.String())
		}
		eventually(t, "nothing is left", func() bool { return pools(t, s) == 0 })
		ln, err := net.Listen("unix", at.String())
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "here") })}
		srv.Protocols.SetHTTP1(true)
		srv.Protocols.SetUnencryptedHTTP2(true)
		ended := make(chan struct{})
		go func() { srv.Serve(ln); close(ended) }()
		t.Cleanup(func() { srv.Close(); <-ended })
		if got := get(); got != "200 here" {
			t.Errorf("h2 %t, once it is there: %s", h2, got)
		}
	}
}

// TestUnixDialsAreBounded: of a pod's requests whose application takes no connections, so many
// connect at once and so many wait; further ones are refused; and once it does, all that wait are served.
func TestUnixDialsAreBounded(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	at := unixHome(t, "a.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: at.String()}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	v := overUnix(pod, at, false)
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	const asked = podSocks + maxWaiters + 80
	fronts := s.front(pod, v, true)
	rt := &http.Transport{DialContext: to(fronts), Protocols: p}
	c := &http.Client{Transport: rt}
	t.Cleanup(rt.CloseIdleConnections)
	for range asked {
		wg.Go(func() {
			res, err := c.Get("http://a/")
			if err == nil {
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
		})
	}
	eventually(t, "as many as may are being made, and wait", func() bool {
		now := ask(t, s, func(l *Loop) [2]int { d := l.dialsOf(pod); return [2]int{d.socks, len(d.sockq)} })[0]
		if now[0] > podSocks || now[1] > maxWaiters {
			t.Fatalf("%d are being made, %d wait", now[0], now[1])
		}
		return now[0] == podSocks && now[1] == maxWaiters && v.codes[exchange.Refused].Load() > 0
	})
	unix.Close(fd) // nobody listens any more: those that connect are refused, and the next have their turn
	wg.Wait()
	if n := v.codes[exchange.Connect].Load(); n < podSocks {
		t.Errorf("%d failed as a connect, of %d", n, asked)
	}
	eventually(t, "nothing is left", func() bool { return pools(t, s) == 0 })
}

// TestUnixAllocations: a request on warm connections allocates nothing, as over TCP.
func TestUnixAllocations(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	at := unixHome(t, "a.sock")
	unixApp(t, at, func(c net.Conn) {
		buf, out := make([]byte, 4096), []byte(okAnswer)
		for {
			if n, err := c.Read(buf); n == 0 || err != nil {
				return
			}
			if _, err := c.Write(out); err != nil {
				return
			}
		}
	})
	v := overUnix(pod, at, false)
	v.silent = true
	if n := perRequest(t, s.front(pod, v, false)); n > 0.01 {
		t.Errorf("%.3f allocations a request, want 0", n)
	}
}
