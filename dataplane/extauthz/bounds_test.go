package extauthz

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
)

// TestConnectsAreBounded: a connect to a service that does not answer has a second, and so long passes at most before the
// next, however long it has been away; grpc-go makes either longer by up to a fifth.
func TestConnectsAreBounded(t *testing.T) {
	for name, hangs := range map[string]bool{"refused": false, "no answer": true} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			var begun, over []time.Time // guarded by mu
			s, err := newService(Config{Target: "passthrough:authz"}, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				mu.Lock()
				begun = append(begun, time.Now())
				mu.Unlock()
				if hangs {
					<-ctx.Done()
				}
				mu.Lock()
				over = append(over, time.Now())
				mu.Unlock()
				return nil, errors.New("nobody is there")
			}))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			s.conn.Connect()
			time.Sleep(5 * time.Minute) // virtual
			mu.Lock()
			defer mu.Unlock()
			if n := len(over); n < 100 {
				t.Fatalf("%s: %d connects in five minutes", name, n)
			}
			for i, end := range over {
				if took := end.Sub(begun[i]); hangs != (took > 0) || took > time.Second+200*time.Millisecond {
					t.Fatalf("%s: connect %d took %v", name, i+1, took)
				}
				if i == 0 {
					continue
				}
				if pause := begun[i].Sub(over[i-1]); pause > time.Second+200*time.Millisecond {
					t.Fatalf("%s: %v before connect %d", name, pause, i+1)
				}
			}
		})
	}
}
