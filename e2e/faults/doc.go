// Package faults takes parts of the control plane away under traffic: two nodes with
// their proxies, a registrar and a real etcd or a real API server, all of them processes.
//
//   - No request to an endpoint that lives may fail, whatever is away.
//   - What etcd has is read as etcd tells it, what a node may send to from its admin.
package faults
