package client_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/registrar/client"
	"aether/dataplane/model"
)

// TestInUseIsInScope: what traffic goes to stays in scope, however it came there (decision 033).
func TestInUseIsInScope(t *testing.T) {
	pay := name("shop/pay")
	for _, tt := range []struct {
		name   string
		before bool // it is in use before the start
		do     func(t *testing.T, n *node, use *atomic.Bool)
	}{
		{"declared by a pod that leaves, used by another", false, func(t *testing.T, n *node, use *atomic.Bool) {
			use.Store(true)
			n.SetDeclared([]model.ServiceName{name("shop/cart"), pay})
			pass(5*time.Minute + time.Second)
			if len(n.heard.of(pay)) != 1 {
				t.Fatal("it has no rows though it is declared")
			}
			n.SetDeclared([]model.ServiceName{name("shop/cart")})
		}},
		{"used again in the last minute of its hour", false, func(t *testing.T, n *node, use *atomic.Bool) {
			n.SetDeclared([]model.ServiceName{name("shop/cart")})
			pass(time.Second)
			n.Want(pay)
			pass(time.Hour - 500*time.Millisecond)
			if len(n.heard.of(pay)) != 1 {
				t.Fatal("it has no rows though somebody asked for it within the hour")
			}
			use.Store(true)
		}},
		{"by rows of before the start", true, func(t *testing.T, n *node, use *atomic.Bool) {
			n.SetDeclared([]model.ServiceName{name("shop/cart")})
			pass(5 * time.Second)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet("10.0.0.1:8443")
				for _, s := range []string{"shop/cart", "shop/pay", "shop/ship"} {
					f.add(s, pod("10.0.0.1", healthy, false))
				}
				var use atomic.Bool
				use.Store(tt.before)
				n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, InUse: func(context.Context) []model.ServiceName {
					if use.Load() {
						return []model.ServiceName{pay}
					}
					return nil
				}})
				defer n.end()
				tt.do(t, n, &use)
				for range 180 {
					pass(time.Second)
					if len(n.heard.of(pay)) != 1 {
						t.Fatal("what is in use has no rows any more")
					}
				}
				use.Store(false)
				pass(time.Hour + 2*time.Minute)
				if len(n.heard.of(pay)) != 0 {
					t.Error("what nobody uses is in scope for ever")
				}
			})
		})
	}
}

// TestNoRowsWithoutAStream: what left the scope while two streams were being joined, and which
// a late second one still had, goes with that.
func TestNoRowsWithoutAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for i := range 300 {
			f.add(fmt.Sprintf("s/%d", i), pod("10.0.0.1", healthy, false))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		n.SetDeclared(numbered(0, 20))
		pass(time.Minute + time.Second)
		n.SetDeclared(append(numbered(0, 20), numbered(100, 108)...))
		pass(time.Second)
		n.SetDeclared(append(numbered(0, 20), numbered(101, 108)...)) // s/100 is needed no more
		f.stall(20)
		n.Want(name("s/200"))
		pass(time.Second)
		f.stall(0)
		pass(time.Second)
		f.lose("s/100", "10.0.0.1")
		f.add("s/100", pod("10.0.0.9", healthy, false))
		pass(10 * time.Minute)
		if rows := n.heard.of(name("s/100")); len(rows) != 0 {
			t.Errorf("%v, which no stream tells of", rows)
		}
	})
}
