package relay

import (
	"bytes"
	"cmp"
	"io"
	"testing"

	"golang.org/x/sys/unix"
)

// urge sends a byte of urgent data.
func urge(t *testing.T, h half) {
	t.Helper()
	raw, err := h.tcp.SyscallConn()
	var serr error
	if err == nil {
		err = raw.Write(func(fd uintptr) bool {
			_, serr = unix.SendmsgN(int(fd), []byte("!"), nil, nil, unix.MSG_OOB)
			return serr != unix.EAGAIN
		})
	}
	if err = cmp.Or(err, serr); err != nil {
		t.Fatal(err)
	}
}

// TestUrgent: a byte of urgent data has its place in what the other side reads, between few bytes
// and between so many that they are spliced.
func TestUrgent(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		for _, size := range []int{3, 200 << 10, 3 << 20} {
			b := newBed(t, kind, nil)
			if b.client.Conn != b.client.tcp {
				b.client.Close()
				b.server.Close()
				b.result(t)
				continue // a client that speaks TLS sends no urgent data that is plaintext
			}
			some := bytes.Repeat([]byte("x"), size)
			got := make(chan []byte, 1)
			go func() {
				all, err := io.ReadAll(b.server)
				if err != nil {
					t.Error(err)
				}
				b.server.CloseWrite()
				got <- all
			}()
			want := bytes.Clone(some)
			b.client.Write(some)
			for range 3 {
				urge(t, b.client)
				b.client.Write(some)
				want = append(append(want, '!'), some...)
			}
			b.client.CloseWrite()
			if all := <-got; !bytes.Equal(all, want) {
				t.Errorf("%d bytes at a time: %d bytes came, want %d", size, len(all), len(want))
			}
			b.result(t)
		}
	})
}
