package relay

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
)

// bed is a relay under test with the application's ends of both sides.
type bed struct {
	client, server half // what the client and the server hold
	ended          chan Result
	taken          bool // the result was
	cancel         context.CancelFunc
}

// half is one application's connection, plain or TLS.
type half struct {
	net.Conn
	tcp *net.TCPConn
}

func (h half) CloseWrite() error {
	if c, ok := h.Conn.(*tls.Conn); ok {
		return errors.Join(c.CloseWrite(), h.tcp.CloseWrite())
	}
	return h.tcp.CloseWrite()
}

func (h half) reset() {
	h.tcp.SetLinger(0)
	h.tcp.Close()
}

func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ch := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		ch <- c
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s := <-ch
	for _, c := range []net.Conn{c, s} { // as tproxy/socket does
		if raw, err := c.(*net.TCPConn).SyscallConn(); err == nil {
			err = raw.Control(func(fd uintptr) { syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_OOBINLINE, 1) })
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// kinds of relay; a hop is two relays in a row.
var kinds = []string{"plain", "tls std", "tls own", "hop std", "hop"}

func newBed(t testing.TB, kind string, first []byte) *bed {
	t.Helper()
	return newBedWith(t, kind, first, Options{})
}

func newBedWith(t testing.TB, kind string, first []byte, o Options) *bed {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	b := &bed{ended: make(chan Result, 1), cancel: cancel}
	c, a := tcpPair(t)
	out, s := tcpPair(t)
	b.client, b.server = half{c, c}, half{s, s}
	switch kind {
	case "plain":
		go func() { b.ended <- Plain(ctx, a, out, first, o) }()
	case "tls std", "tls own":
		// The server is crypto/tls with our server configuration.
		m := map[string]record.Maker{"tls std": record.Std, "tls own": record.Own}[kind]
		cc, sc := configs(t)
		stream := record.Client(out, cc, m)
		tc := tls.Server(s, sc)
		done := make(chan error, 1)
		go func() { done <- tc.Handshake() }()
		if err := errors.Join(stream.Handshake(t.Context()), <-done); err != nil {
			t.Fatal(err)
		}
		b.server = half{tc, s}
		go func() { b.ended <- TLS(ctx, a, out, stream.Flip(), first, o) }()
	case "hop", "hop std":
		m := record.Own
		if kind == "hop std" {
			m = record.Std
		}
		x, y := tcpPair(t)
		cc, sc := configs(t)
		cs, ss := record.Client(x, cc, m), record.Server(y, sc, m)
		done := make(chan error, 1)
		go func() { done <- ss.Handshake(t.Context()) }()
		if err := errors.Join(cs.Handshake(t.Context()), <-done); err != nil {
			t.Fatal(err)
		}
		far := make(chan Result, 1)
		go func() {
			far <- TLS(context.WithoutCancel(ctx), out, y, ss.Flip(), nil, Options{Patrol: 500 * time.Millisecond})
		}() // ends with the near one
		go func() {
			r := TLS(ctx, a, x, cs.Flip(), first, o)
			<-far
			b.ended <- r
		}()
	}
	t.Cleanup(func() {
		cancel()
		if !b.taken {
			<-b.ended
		}
	})
	return b
}

func configs(t testing.TB) (client, server *tls.Config) {
	t.Helper()
	ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	id, err := spiffeid.ForServiceAccount("mesh.test", "t", "pod")
	if err != nil {
		t.Fatal(err)
	}
	s, err := ca.Issue(id, 0)
	if err != nil {
		t.Fatal(err)
	}
	return mtls.ClientConfig(mtls.Client{SVID: s, SNI: "5432", Pin: id}),
		mtls.ServerConfig(mtls.Server{SVID: func() *mtls.SVID { return s }, Serves: func(uint16) bool { return true }})
}

func (b *bed) result(t testing.TB) Result {
	t.Helper()
	select {
	case r := <-b.ended:
		b.taken = true
		return r
	case <-time.After(20 * time.Second):
		buf := make([]byte, 1<<20)
		t.Fatalf("the relay did not end\n%s", buf[:runtime.Stack(buf, true)])
		panic("unreachable")
	}
}

func each(t *testing.T, f func(t *testing.T, kind string)) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			before := runtime.NumGoroutine()
			f(t, kind)
			for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > before; {
				if time.Now().After(end) {
					buf := make([]byte, 1<<20)
					t.Fatalf("%d goroutines, %d before\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
				}
				runtime.Gosched()
			}
		})
	}
}

// pour writes n bytes in random pieces and returns their digest.
func pour(w io.Writer, n int, seed uint64) (sum []byte, err error) {
	r := rand.New(rand.NewPCG(seed, 1))
	h := sha256.New()
	buf := make([]byte, 300<<10)
	for i := range buf {
		buf[i] = byte(r.Uint32())
	}
	for n > 0 {
		k := min(n, []int{1, 100, 16384, 16385, 65536, len(buf)}[r.IntN(6)])
		buf[0]++
		h.Write(buf[:k])
		if _, err := w.Write(buf[:k]); err != nil {
			return nil, err
		}
		n -= k
	}
	return h.Sum(nil), nil
}

func digest(r io.Reader) (sum []byte, n int64, err error) {
	h := sha256.New()
	n, err = io.Copy(h, r)
	return h.Sum(nil), n, err
}

// Bulk in both directions at once, with end of stream passed on each way.
func TestBulk(t *testing.T) {
	const total = 16 << 20
	each(t, func(t *testing.T, kind string) {
		b := newBed(t, kind, nil)
		var wg sync.WaitGroup
		for i, d := range []struct{ from, to half }{{b.client, b.server}, {b.server, b.client}} {
			var sent []byte
			var serr error
			put := make(chan struct{})
			go func() {
				defer close(put)
				if sent, serr = pour(d.from, total, uint64(i)); serr == nil {
					serr = d.from.CloseWrite()
				}
			}()
			wg.Go(func() {
				got, n, err := digest(d.to)
				<-put
				if err != nil || serr != nil || n != total || !bytes.Equal(got, sent) {
					t.Errorf("direction %d: %d bytes, %v %v, equal %v", i, n, err, serr, bytes.Equal(got, sent))
				}
			})
		}
		wg.Wait()
		if r := b.result(t); r.End != Finished || r.Err != nil || r.AtoB != total || r.BtoA != total || r.First == Nobody {
			t.Errorf("%+v", r)
		}
	})
}

// One side's end leaves the other direction alone, for as long as it takes.
func TestHalfClose(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		for _, clientFirst := range []bool{true, false} {
			b := newBed(t, kind, nil)
			near, far, first := b.client, b.server, A
			if !clientFirst {
				near, far, first = far, near, B
			}
			io.WriteString(near, "question")
			if err := near.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(far); string(got) != "question" || err != nil {
				t.Fatalf("%q, %v", got, err)
			}
			for range 3 { // the other way still works, piece by piece
				io.WriteString(far, "answer")
				p := make([]byte, 6)
				if _, err := io.ReadFull(near, p); err != nil || string(p) != "answer" {
					t.Fatalf("%q, %v", p, err)
				}
			}
			far.CloseWrite()
			if got, err := io.ReadAll(near); len(got) > 0 || err != nil {
				t.Fatalf("%q, %v", got, err)
			}
			r := b.result(t)
			if r.End != Finished || r.First != first {
				t.Errorf("client first %v: %+v", clientFirst, r)
			}
			if q, a := r.AtoB, r.BtoA; clientFirst && (q != 8 || a != 18) || !clientFirst && (q != 18 || a != 8) {
				t.Errorf("client first %v: %d, %d bytes", clientFirst, q, a)
			}
		}
	})
}

// A reset is passed on as a reset: in the middle, and after an orderly end of
// the same side, when nobody reads or writes there any more.
func TestReset(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		for _, tt := range []struct{ client, afterEnd bool }{{true, false}, {false, false}, {true, true}, {false, true}} {
			b := newBed(t, kind, nil)
			near, far, side := b.client, b.server, A
			if !tt.client {
				near, far, side = far, near, B
			}
			io.WriteString(near, "x")
			if _, err := io.ReadFull(far, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			if tt.afterEnd {
				near.CloseWrite()
				if _, err := io.ReadAll(far); err != nil {
					t.Fatal(err)
				}
			}
			near.reset()
			// Not a read: behind a FIN it answers 0 for ever.
			raw, err := far.tcp.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			far.tcp.SetReadDeadline(time.Now().Add(10 * time.Second))
			err = watch(&end{Conn: far.tcp, raw: raw})
			if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
				t.Errorf("%+v: the other side sees %v", tt, err)
			}
			if r := b.result(t); r.End != Reset || r.First != side || r.Err == nil {
				t.Errorf("%+v: %+v", tt, r)
			}
		}
	})
}

// The kernel tells of a reset once. Whoever is told, the reader, the writer or the patrol, what goes
// on to the other side is a reset and never an end.
func TestResetIsNoEnd(t *testing.T) {
	for kind, runs := range map[string]int{"plain": 150, "tls own": 30} {
		for _, busy := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, busy %v", kind, busy), func(t *testing.T) {
				for i := range runs {
					b := newBedWith(t, kind, nil, Options{Patrol: 20 * time.Microsecond})
					io.WriteString(b.client, "x")
					if _, err := io.ReadFull(b.server, make([]byte, 1)); err != nil {
						t.Fatal(err)
					}
					if busy {
						// One write, which the socket takes whole: a later one would be told of
						// the reset in place of the read. The relay is at it when the client goes.
						if _, err := b.server.Write(make([]byte, 200<<10)); err != nil {
							t.Fatal(err)
						}
						if _, err := io.ReadFull(b.client, make([]byte, 100)); err != nil {
							t.Fatal(err)
						}
					}
					b.client.reset()
					if n, err := b.server.Read(make([]byte, 1)); n > 0 || err == nil || err == io.EOF {
						t.Fatalf("run %d: the server read %d bytes and sees %v, want a reset", i, n, err)
					}
					b.server.tcp.Close()
					if r := b.result(t); r.End != Reset || r.First != A {
						t.Fatalf("run %d: %+v", i, r)
					}
				}
			})
		}
	}
}

// A hop that ends without close_notify may have been cut by somebody else.
func TestTruncated(t *testing.T) {
	for _, kind := range []string{"tls std", "tls own"} {
		b := newBed(t, kind, nil)
		io.WriteString(b.server, "half of the ans")
		if _, err := io.ReadFull(b.client, make([]byte, 15)); err != nil {
			t.Fatal(err)
		}
		b.server.tcp.CloseWrite()
		if _, err := b.client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: the client sees %v, want a reset", kind, err)
		}
		if r := b.result(t); r.End != Truncated || r.First != B {
			t.Errorf("%s: %+v", kind, r)
		}
	}
}

// Junk on the hop: the peer gets an alert, the client a reset.
func TestBroken(t *testing.T) {
	for _, kind := range []string{"tls std", "tls own"} {
		b := newBed(t, kind, nil)
		b.server.tcp.Write([]byte{23, 3, 3, 0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0})
		if _, err := b.client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: the client sees %v, want a reset", kind, err)
		}
		if r := b.result(t); r.End != Broken || r.First != B || !strings.Contains(r.Err.Error(), "bad record MAC") {
			t.Errorf("%s: %+v", kind, r)
		}
		if _, err := b.server.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "bad record MAC") {
			t.Errorf("%s: the peer sees %v, want the alert", kind, err)
		}
	}
}

func TestCancel(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		b := newBed(t, kind, nil)
		io.WriteString(b.client, "x")
		if _, err := io.ReadFull(b.server, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		b.cancel()
		if r := b.result(t); r.End != Cancelled || r.First != Nobody || !errors.Is(r.Err, context.Canceled) {
			t.Errorf("%+v", r)
		}
		if _, err := b.client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the client sees %v", err)
		}
	})
}

// A cancelled relay ends although both sides are stuck writing.
func TestCancelStuck(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		b := newBed(t, kind, nil)
		var wg sync.WaitGroup
		for _, h := range []half{b.client, b.server} {
			wg.Go(func() { // nobody reads, so at last a write does not go on
				for buf := make([]byte, 32<<10); ; {
					h.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
					if _, err := h.Write(buf); err != nil {
						return
					}
				}
			})
		}
		wg.Wait()
		b.cancel()
		b.result(t)
	})
}

// A reset is noticed by a relay of which one direction is stuck writing and the
// other has nothing to do: neither reads the connection that was reset.
func TestResetWhileStuck(t *testing.T) {
	clientEnd, a := tcpPair(t)
	b, serverEnd := tcpPair(t)
	done := make(chan Result, 1)
	go func() { done <- Plain(t.Context(), a, b, nil, Options{Patrol: 50 * time.Millisecond}) }()
	for buf := make([]byte, 32<<10); ; { // the server never reads
		clientEnd.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := clientEnd.Write(buf); err != nil {
			break
		}
	}
	clientEnd.SetLinger(0)
	clientEnd.Close()
	select {
	case r := <-done:
		if r.End != Reset || r.First != A {
			t.Errorf("%+v", r)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the reset was not noticed")
	}
	if _, err := io.Copy(io.Discard, serverEnd); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server sees %v, want a reset", err)
	}
}

func TestFirst(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		first := bytes.Repeat([]byte("GET / "), 20000)
		b := newBed(t, kind, first)
		io.WriteString(b.client, "rest")
		b.client.CloseWrite()
		got, err := io.ReadAll(b.server)
		if want := string(first) + "rest"; string(got) != want || err != nil {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		b.server.CloseWrite()
		if r := b.result(t); r.End != Finished || r.AtoB != int64(len(got)) {
			t.Errorf("%+v", r)
		}
	})
}

// TestCase82 (ztunnel 1630): an idle relay holds neither buffer nor pipe, even after bulk.
func TestCase82(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		b := newBed(t, kind, nil)
		for _, d := range []struct{ from, to half }{{b.client, b.server}, {b.server, b.client}} {
			const n = 4 << 20
			done := make(chan error, 1)
			go func() { _, err := pour(d.from, n, 1); done <- err }()
			if _, err := io.CopyN(io.Discard, d.to, n); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		for end := time.Now().Add(5 * time.Second); ; runtime.Gosched() {
			var held int64
			for _, s := range sizes {
				held += s.inUse.Load()
			}
			if held == 0 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%d buffers held", held)
			}
		}
		b.client.CloseWrite()
		b.server.CloseWrite()
		io.Copy(io.Discard, b.client)
		io.Copy(io.Discard, b.server)
		if r := b.result(t); r.End != Finished {
			t.Errorf("%+v", r)
		}
	})
}

// TestCase83 (istio 43066): silence cuts nothing. The only thing that time does here is
// the patrol, which looks every 15 s; an hour of its looks are in this half second.
func TestCase83(t *testing.T) {
	t.Parallel()
	client, a := tcpPair(t)
	b, server := tcpPair(t)
	ended := make(chan Result, 1)
	go func() { ended <- Plain(t.Context(), a, b, nil, Options{Patrol: 2 * time.Millisecond}) }()
	for _, end := range []*net.TCPConn{client, server} {
		end.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		if n, err := end.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("read %d bytes, %v from an idle relay", n, err)
		}
		end.SetReadDeadline(time.Time{})
	}
	select {
	case r := <-ended:
		t.Fatalf("it ended: %+v", r)
	default:
	}
	for _, d := range [][2]*net.TCPConn{{client, server}, {server, client}} {
		if _, err := io.WriteString(d[0], "after"); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 5)
		if _, err := io.ReadFull(d[1], got); err != nil || string(got) != "after" {
			t.Fatalf("%q, %v", got, err)
		}
	}
	client.CloseWrite()
	server.CloseWrite()
	if r := <-ended; r.End != Finished {
		t.Errorf("%+v", r)
	}
}

// Bulk between plain sockets goes through the kernel's pipes and not through us.
func TestSplices(t *testing.T) {
	for len(pipes) > 0 {
		(<-pipes).close()
	}
	b := newBed(t, "plain", nil)
	done := make(chan error, 1)
	go func() { _, err := pour(b.client, 8<<20, 1); b.client.CloseWrite(); done <- err }()
	if _, n, err := digest(b.server); n != 8<<20 || err != nil {
		t.Fatal(n, err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b.server.CloseWrite()
	if r := b.result(t); r.End != Finished {
		t.Errorf("%+v", r)
	}
	if len(pipes) == 0 {
		t.Error("no pipe was used")
	}
}

// The record layer's own answers go out between data, in order.
func TestKeyUpdates(t *testing.T) {
	for _, m := range []record.Maker{record.Std, record.Own} {
		c, a := tcpPair(t)
		out, s := tcpPair(t)
		cc, sc := configs(t)
		cs, ss := record.Client(out, cc, m), record.Server(s, sc, record.Own)
		hs := make(chan error, 1)
		go func() { hs <- ss.Handshake(t.Context()) }()
		if err := errors.Join(cs.Handshake(t.Context()), <-hs); err != nil {
			t.Fatal(err)
		}
		ended := make(chan Result, 1)
		go func() { ended <- TLS(t.Context(), a, out, cs.Flip(), nil, Options{}) }()
		peer := ss.Flip()
		asker, ok := peer.(record.Rekeyer)
		if !ok {
			t.Fatalf("%T cannot ask for key updates", peer)
		}
		const total = 2 << 20
		sent := make(chan []byte, 1)
		go func() {
			sum, err := pour(c, total, 3)
			if err != nil {
				t.Error(err)
			}
			c.CloseWrite()
			sent <- sum
		}()
		h := sha256.New()
		buf, p := make([]byte, 50000), make([]byte, 20000)
		n, asked := 0, 0
		for n < total {
			k, err := s.Read(buf)
			if err != nil {
				t.Fatal(n, err)
			}
			peer.Feed(buf[:k])
			before := n
			for err == nil {
				k, err = peer.Read(p)
				h.Write(p[:k])
				n += k
			}
			if err != record.ErrMore && err != io.EOF {
				t.Fatal(n, err)
			}
			if n == before || asked > n*10/total {
				continue // ten times in all: many unanswered at once would look like a flood
			}
			asked++
			wire := asker.Rekey(nil) // ask for new keys, and say something
			if wire, err = peer.Seal(wire, []byte("!")); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Write(wire); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(h.Sum(nil), <-sent) {
			t.Error("other bytes came")
		}
		s.Write(peer.CloseNotify(nil))
		io.Copy(io.Discard, c)
		if r := <-ended; r.End != Finished || r.AtoB != total {
			t.Errorf("%+v", r)
		}
	}
}

func TestBufferPutTwice(t *testing.T) {
	b := take(0, nil, nil)
	b.put()
	defer func() {
		if recover() == nil {
			t.Error("putting a buffer twice must panic")
		}
	}()
	b.put()
}

// Beyond a size's share of memory directions get smaller buffers.
func TestBufferBudget(t *testing.T) {
	var all []*buffer
	for range most512k + most256k + most64k + 1 {
		all = append(all, take(len(sizes)-1, nil, nil))
	}
	counts := map[int]int{}
	for _, b := range all {
		counts[b.size.slots]++
		b.put()
	}
	if want := fmt.Sprint(map[int]int{32: 64, 16: 128, 4: 512, 1: 1}); fmt.Sprint(counts) != want {
		t.Errorf("%v, want %s", counts, want)
	}
}
