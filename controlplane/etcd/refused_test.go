package etcd

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"aether/controlplane/registry"
	"aether/dataplane/model"
	"aether/e2e/etcdtest"
)

// TestWithoutSpace: an etcd whose quota is used up takes no row, neither a new one nor
// another text of one that is there, and takes removals. That makes no row unfit.
func TestWithoutSpace(t *testing.T) {
	server := etcdtest.StartWith(t, etcdtest.Options{Args: []string{"--quota-backend-bytes=2000000"}})
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	put(t, s, cart, row("10.0.0.2", "1"))
	c := server.Client()
	err := error(nil)
	for range 200 {
		if _, err = c.Put(t.Context(), "/fill", strings.Repeat("x", 100_000)); err != nil {
			break
		}
	}
	if !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Fatalf("filling it ends with %v", err)
	}
	for _, e := range []string{"10.0.0.3", "10.0.0.1"} {
		if err := s.Put(t.Context(), cart, row(e, "2")); !errors.Is(err, rpctypes.ErrNoSpace) || errors.Is(err, registry.ErrUnfit) {
			t.Errorf("a row of %s: %v, want no space", e, err)
		}
	}
	if err := s.Delete(t.Context(), cart, "10.0.0.2", registry.Statement{}); err != nil {
		t.Errorf("a removal: %v", err)
	}
	if r, err := c.Get(t.Context(), registry.Root, clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil || r.Count != 1 {
		t.Errorf("%d rows are left (%v), want 1", r.Count, err)
	}
}

// TestUnfit: what a write itself is at fault for, in a real etcd, and what it is not.
func TestUnfit(t *testing.T) {
	server := etcdtest.StartWith(t, etcdtest.Options{Args: []string{"--max-request-bytes=20000"}})
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}})
	put(t, s, cart, row("10.0.0.1", "1"))
	large := row("10.0.0.2", strings.Repeat("x", 30_000))
	none := row("10.0.0.3", "1")
	none.Ports, none.PortProtocols = nil, nil
	for name, e := range map[string]error{
		"a row that is too large":  s.Put(t.Context(), cart, large),
		"a row without a port":     s.Put(t.Context(), cart, none),
		"a removal of no address":  s.Delete(t.Context(), cart, "", registry.Statement{}),
		"a removal of two parts":   s.Delete(t.Context(), cart, "10.0.0.1/x", registry.Statement{}),
		"a service that is no key": s.Put(t.Context(), model.ServiceName{Namespace: "a/b", Name: "cart"}, row("10.0.0.4", "1")),
	} {
		if !errors.Is(e, registry.ErrUnfit) {
			t.Errorf("%s: %v, want it unfit", name, e)
		}
	}
	put(t, s, cart, row("10.0.0.4", "1")) // others are taken all the same
	server.Kill()
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := s.Put(short, cart, large); err == nil || errors.Is(err, registry.ErrUnfit) {
		t.Errorf("while the store is away: %v, want it to be no reason against the row", err)
	}
}

// TestRoleWithoutPut: a role that may read all rows and write those of one service makes no
// row of another one unfit.
func TestRoleWithoutPut(t *testing.T) {
	server := etcdtest.Start(t)
	ctx := t.Context()
	s := newStore(t, Config{Endpoints: []string{server.Endpoint()}, User: "registrar", Password: "password"})
	c := server.Client()
	dir, err := registry.ServiceDir("local", "local", cart)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []func() error{
		func() error { _, err := c.RoleAdd(ctx, "root"); return err },
		func() error { _, err := c.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.RoleAdd(ctx, "mesh"); return err },
		func() error {
			_, err := c.RoleGrantPermission(ctx, "mesh", registry.Root, clientv3.GetPrefixRangeEnd(registry.Root), clientv3.PermissionType(clientv3.PermRead))
			return err
		},
		func() error {
			_, err := c.RoleGrantPermission(ctx, "mesh", dir, clientv3.GetPrefixRangeEnd(dir), clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func() error { _, err := c.UserAdd(ctx, "registrar", "password"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "registrar", "mesh"); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	} {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	put(t, s, cart, row("10.0.0.1", "1"))
	err = s.Put(ctx, model.ServiceName{Namespace: "shop", Name: "pay"}, row("10.0.0.2", "1"))
	if !errors.Is(err, rpctypes.ErrPermissionDenied) || errors.Is(err, registry.ErrUnfit) {
		t.Errorf("a row of a service that the role does not cover: %v, want permission denied", err)
	}
}
