package tool

// Etcd is etcd's binary.
var Etcd = Tool{
	Name: "etcd", Env: "AETHER_ETCD", Module: "e2e/etcdtest/testdata/etcd", Package: "go.etcd.io/etcd/server/v3",
}
