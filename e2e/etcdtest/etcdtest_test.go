package etcdtest

import (
	"context"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"aether/e2e/rig"
)

// put and get try again for a while: a cluster that elects its leader refuses both.
func put(t *testing.T, c *clientv3.Client, key, value string) {
	t.Helper()
	try(t, func(ctx context.Context) error {
		_, err := c.Put(ctx, key, value)
		return err
	})
}

func get(t *testing.T, c *clientv3.Client, key string) (value string) {
	t.Helper()
	try(t, func(ctx context.Context) error {
		r, err := c.Get(ctx, key)
		if err == nil && len(r.Kvs) > 0 {
			value = string(r.Kvs[0].Value)
		}
		return err
	})
	return value
}

func try(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := rig.Until(ctx, f); err != nil {
		t.Fatal(err)
	}
}

// What others rely on: data survives a kill, goes with Wipe, and is older after Load.
func TestData(t *testing.T) {
	s := StartWith(t, Options{TLS: true})
	put(t, s.Client(), "k", "one")
	s.Kill()
	saved := s.Save()
	s.Restart()
	if got := get(t, s.Client(), "k"); got != "one" {
		t.Errorf("after a restart %q, want one", got)
	}
	put(t, s.Client(), "k", "two")
	s.Kill()
	s.Load(saved)
	s.Restart()
	if got := get(t, s.Client(), "k"); got != "one" {
		t.Errorf("after Load %q, want one", got)
	}
	s.Kill()
	s.Wipe()
	s.Restart()
	if got := get(t, s.Client(), "k"); got != "" {
		t.Errorf("after Wipe %q, want nothing", got)
	}
}

// A cluster of three serves with its leader gone, and the member that comes back catches up.
func TestCluster(t *testing.T) {
	all := Cluster(t, 3)
	put(t, all[0].Client(), "k", "one")
	was := Leader(t, all)
	was.Kill()
	now := Leader(t, all)
	if now == was {
		t.Fatal("the dead lead")
	}
	put(t, now.Client(), "k", "two")
	was.Restart()
	if got := get(t, was.Client(), "k"); got != "two" {
		t.Errorf("the member that came back has %q, want two", got)
	}
}

// A gate that is shut lets nothing through, and everything once it is open again.
func TestGate(t *testing.T) {
	s := Start(t)
	g := NewGate(t, s.Addr())
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + g.Addr()}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	put(t, c, "k", "one")
	g.Shut()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := c.Get(ctx, "k"); err == nil {
		t.Error("a shut gate let a read through")
	}
	if err := g.Open(); err != nil {
		t.Fatal(err)
	}
	g.Cut()
	if got := get(t, c, "k"); got != "one" {
		t.Errorf("after Open %q, want one", got)
	}
}
