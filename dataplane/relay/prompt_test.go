package relay

import (
	"io"
	"slices"
	"testing"
	"time"
)

// TestWritesApart: a peer that writes each message in two pieces, with Nagle's algorithm, waits for the
// other side's answer and not for the kernel's acknowledgement: whichever side it is.
func TestWritesApart(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		for _, side := range []string{"client", "server"} {
			b := newBed(t, kind, nil)
			say, hear := b.client, b.server
			if side == "server" {
				say, hear = hear, say
			}
			if say.Conn != say.tcp { // the records of a hop are ours
				b.client.Close()
				b.server.Close()
				b.result(t)
				continue
			}
			if err := say.tcp.SetNoDelay(false); err != nil {
				t.Fatal(err)
			}
			go func() {
				buf := make([]byte, 8)
				for {
					if _, err := io.ReadFull(hear, buf); err != nil {
						hear.CloseWrite()
						return
					}
					hear.Write(buf[:1])
				}
			}()
			var took []time.Duration
			for range 41 {
				start := time.Now()
				for _, p := range []string{"head", "body"} {
					if _, err := io.WriteString(say, p); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := io.ReadFull(say, make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				took = append(took, time.Since(start))
			}
			slices.Sort(took)
			if p50 := took[len(took)/2]; p50 > 20*time.Millisecond { // an acknowledgement that is put off takes 40 at least
				t.Errorf("%s: half of the messages took %v and more", side, p50)
			}
			say.CloseWrite()
			b.result(t)
		}
	})
}
