package engine

import (
	"bytes"
	"fmt"
	"testing"

	oracle "golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
)

// TestFloodsOfAPod: what one pod's clients do all at once is not what a neighbour's request waits
// for. The floods and the neighbour's request are there when the loop looks, the request
// last of all; it is begun within so many iterations, none of which does more than the
// pod's share.
func TestFloodsOfAPod(t *testing.T) {
	frame := func(f func(fr *oracle.Framer)) []byte {
		var b bytes.Buffer
		f(oracle.NewFramer(&b, nil))
		return b.Bytes()
	}
	get := []byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	preface := append([]byte(oracle.ClientPreface), frame(func(fr *oracle.Framer) { fr.WriteSettings(); fr.WriteSettingsAck() })...)
	heads := bytes.Clone(preface)
	for i := range uint32(900) { // of 14 bytes each
		heads = append(heads, frame(func(fr *oracle.Framer) {
			fr.WriteHeaders(oracle.HeadersFrameParam{StreamID: 2*i + 1, BlockFragment: []byte{0x82, 0x84, 0x86, 0x41, 0x01, 'a'}, EndStream: true, EndHeaders: true})
		})...)
	}
	for _, tt := range []struct {
		name  string
		conns int
		h2    bool
		bytes []byte // sent on each
		close bool   // and then closed
		reset bool   // with a reset
		fresh bool   // the connections are not accepted yet
		want  int64  // requests of it that the service sees in the end
	}{
		{name: "many sockets", conns: 2000, bytes: get, want: 2000},
		{name: "pipelines", conns: 50, bytes: bytes.Repeat(get, 500), want: 50 * 500},
		{name: "heads without an end", conns: 2000, bytes: get[:len(get)-2]},
		{name: "HTTP/2 heads", conns: 20, h2: true, bytes: heads, want: 20 * 900},
		{name: "HTTP/2 frames without bytes", conns: 200, h2: true, bytes: append(bytes.Clone(preface), frame(func(fr *oracle.Framer) {
			for range 900 {
				fr.WriteWindowUpdate(0, 1)
			}
		})...)},
		{name: "new connections", conns: 1000, bytes: get, fresh: true, want: 1000},
		{name: "ends", conns: 2000, close: true},
		{name: "resets", conns: 2000, close: true, reset: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, Config{})
			pod, other := s.e.AddPod("p"), s.e.AddPod("q")
			// Of each iteration, what the pod's part in it was.
			var per = map[uint64]int{}
			var most int
			v := &svc{pod: pod, silent: true, request: func(x *exchange.Exchange) bool {
				it := x.Conn.(*ConnInfo).Loop.Iteration()
				if per[it]++; per[it] > most {
					most = per[it]
				}
				return local(x)
			}}
			var begun uint64
			b := &svc{pod: other, request: func(x *exchange.Exchange) bool {
				begun = x.Conn.(*ConnInfo).Loop.Iteration()
				return local(x)
			}}
			addr, quiet := s.front(pod, v, tt.h2), s.front(other, b, false)
			var flood []int
			open := func() {
				for range tt.conns {
					flood = append(flood, rawDial(t, addr))
				}
			}
			t.Cleanup(func() {
				for _, fd := range flood {
					unix.Close(fd)
				}
			})
			me := rawDial(t, quiet)
			t.Cleanup(func() { unix.Close(me) })
			if !tt.fresh {
				open()
				eventually(t, "all are accepted", func() bool { return pod.Conns() == int64(tt.conns) })
			}
			eventually(t, "and the neighbour's", func() bool { return other.Conns() == 1 })
			var at uint64
			s.onLoop(func(l *Loop) { // which sees nothing of it before this has returned
				if tt.fresh {
					open()
				}
				for _, fd := range flood {
					for b := tt.bytes; len(b) > 0; {
						n, err := unix.Write(fd, b)
						if err != nil {
							t.Error(err)
							return
						}
						b = b[n:]
					}
				}
				if tt.close {
					for _, fd := range flood {
						if tt.reset {
							_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
						}
						unix.Close(fd)
					}
					flood = nil
				}
				unix.Write(me, get)
				at = l.Iteration()
			})
			eventually(t, "the neighbour is answered", func() bool { return b.done.Load() == 1 })
			var took uint64
			s.onLoop(func(*Loop) { took = begun - at })
			if took > 2 {
				t.Errorf("begun %d iterations after it was there, want at most 2", took)
			}
			eventually(t, "the flood is handled all the same", func() bool { return v.done.Load() == tt.want })
			s.onLoop(func(*Loop) {
				if most > podWork {
					t.Errorf("an iteration began %d of the flood's requests, want at most %d", most, podWork)
				}
			})
			if tt.close {
				eventually(t, "closed", func() bool { return pod.Conns() == 0 })
			}
			t.Logf("begun after %d iterations; most in one: %d", took, most)
		})
	}
}

// rawDial connects a socket outside of Go's poller.
func rawDial(t *testing.T, addr string) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var port int
	fmt.Sscanf(addr, "127.0.0.1:%d", &port)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestManyBusyPods: the more pods have work put off, the less an iteration does of each.
func TestManyBusyPods(t *testing.T) {
	s := newStage(t, Config{})
	const pods, each = 12, 100
	get := bytes.Repeat([]byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), each)
	per := map[uint64]int{}
	var most, done int
	var fds []int
	for i := range pods {
		pod := s.e.AddPod(fmt.Sprint(i))
		addr := s.front(pod, &svc{pod: pod, silent: true, request: func(x *exchange.Exchange) bool {
			it := x.Conn.(*ConnInfo).Loop.Iteration()
			per[it]++
			done++
			return local(x)
		}}, false)
		for range 20 {
			fds = append(fds, rawDial(t, addr))
		}
		eventually(t, "accepted", func() bool { return pod.Conns() == 20 })
	}
	t.Cleanup(func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	})
	var at uint64
	s.onLoop(func(l *Loop) {
		for _, fd := range fds {
			unix.Write(fd, get)
		}
		at = l.Iteration()
	})
	eventually(t, "all is done", func() (over bool) {
		s.onLoop(func(*Loop) { over = done == pods*20*each })
		return
	})
	s.onLoop(func(*Loop) {
		for it, n := range per {
			if it > at+2 && n > most { // it has to be seen first how many there are
				most = n
			}
		}
	})
	if limit := pods * max(leastWork, podWork/pods); most > limit {
		t.Errorf("an iteration began %d requests of %d pods, want at most %d", most, pods, limit)
	}
}
