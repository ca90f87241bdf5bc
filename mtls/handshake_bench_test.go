package mtls_test

import (
	"crypto/tls"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/mtls"
)

// BenchmarkHandshake is a whole handshake between two workloads, with X25519MLKEM768 and
// both certificates verified: processor time of either side's thread.
func BenchmarkHandshake(b *testing.B) {
	ca := mustCA(b, "td")
	web, cart := issue(b, ca, "web"), issue(b, ca, "cart")
	cl := mtls.ClientConfig(mtls.Client{SVID: web, SNI: "8080", ALPN: []string{"h2"}, Pin: cart.ID})
	sv := mtls.ServerConfig(mtls.Server{Pod: "c", SVID: always(cart), Serves: served})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	side := func(c *tls.Conn, spent *time.Duration) error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		began := threadTime(b)
		err := c.Handshake()
		*spent += threadTime(b) - began
		return err
	}
	var client, server time.Duration
	for b.Loop() {
		done := make(chan error, 1)
		go func() {
			c, err := l.Accept()
			if err == nil {
				s := tls.Server(c, sv)
				if err = side(s, &server); err == nil {
					_, err = s.Write([]byte{1})
				}
				s.Close()
			}
			done <- err
		}()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		s := tls.Client(c, cl)
		if err := side(s, &client); err != nil {
			b.Fatal(err)
		}
		if got := s.ConnectionState().CurveID; got != tls.X25519MLKEM768 {
			b.Fatalf("key exchange %v", got)
		}
		if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
		s.Close()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(client.Microseconds())/float64(b.N), "client-us")
	b.ReportMetric(float64(server.Microseconds())/float64(b.N), "server-us")
}

// threadTime is the processor time that this thread has had.
func threadTime(b *testing.B) time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return time.Duration(t.Nano())
}
